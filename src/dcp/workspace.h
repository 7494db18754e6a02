/* dcp/workspace.h - the list of a handle's buffers and their sizes. */
#ifndef KVS_DCP_WORKSPACE_H
#define KVS_DCP_WORKSPACE_H

#include "dcp/dcp.h"

/* Grouped as dcp_workspace sums them. */
typedef enum dcp_buf {
    DCP_BUF_TABLE,
    DCP_BUF_ROW_REQ,
    DCP_BUF_BOUND,
    DCP_BUF_BOUND_LOCAL,
    DCP_BUF_SLOT,
    DCP_BUF_SLOTS,
    DCP_BUF_LANE_COUNT,
    DCP_BUF_ALL_ID,
    DCP_BUF_ALL_COUNT,
    DCP_BUF_IQ,
    DCP_BUF_IW,
    DCP_BUF_SCORE,
    DCP_BUF_N_COL,
    DCP_BUF_CAND_SEND,
    DCP_BUF_CAND_RECV,
    DCP_BUF_CUT_SCORE,
    DCP_BUF_CUT_ID,
    DCP_BUF_CUT_TOTAL,
    DCP_BUF_Q_LOCAL,
    DCP_BUF_Q_WIRE,
    DCP_BUF_Q_FULL,
    DCP_BUF_Q_SCALE,
    DCP_BUF_NODE_OUT,
    DCP_BUF_NODE_LSE,
    DCP_BUF_WIRE_SEND,
    DCP_BUF_WIRE_RECV,
    DCP_BUF_CTX_LOCAL,
    DCP_BUF_CTX_WIRE,
    DCP_BUF_CTX_ROWS,
    DCP_BUF_CTX_LEN,
    DCP_BUF_CTX_PART0,
    DCP_BUF_CTX_PART1,
    DCP_BUF_CTX_PART2,
    DCP_BUF_CTX_LSE0,
    DCP_BUF_CTX_LSE1,
    DCP_BUF_CTX_LSE2,
    DCP_BUF_SCRATCH,
    DCP_N_BUF
} dcp_buf;

typedef struct dcp_layout {
    int64_t bytes[DCP_N_BUF];
    int32_t chunk_rows, ctx_chunk, ctx_pad, score_rows;
    int64_t table_width;
    int64_t message; /* see dcp_workspace */
} dcp_layout;

/* Rows of one exchange when a row has this many heads. */
int32_t dcp_chunk_rows(const dcp_setup *s, int32_t heads);
void dcp_layout_of(const dcp_setup *s, const kern_table *kern, dcp_layout *l);
void dcp_layout_sum(const dcp_layout *l, dcp_workspace *out);

#endif
