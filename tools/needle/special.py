"""Added tokens, in the order and with the names of the GLM family, at the end of the vocabulary."""
VOCAB = 4096
SPECIAL = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
           "<|assistant|>", "<|observation|>", "/nothink", "<think>", "</think>", "<tool_call>",
           "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
           "<arg_value>", "</arg_value>")
EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")
FIRST_SPECIAL = VOCAB - len(SPECIAL)


def special_id(token):
    return FIRST_SPECIAL + SPECIAL.index(token)
