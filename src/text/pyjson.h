/* text/pyjson.h - JSON written the way the chat formats write it: as Python's json.dumps with
 * ensure_ascii=False does. ", " and ": " between parts, keys in their order, shortest numbers that read
 * back the same. */
#ifndef TEXT_PYJSON_H
#define TEXT_PYJSON_H

#include <jansson.h>

#include "base/buf.h"

void pyjson_add(textbuf *b, const json_t *v);

#endif
