/* comm/tcp_meet.h: how processes that know one address find each other; private to tcp*.c. */
#ifndef KVS_COMM_TCP_MEET_H
#define KVS_COMM_TCP_MEET_H

#include "comm/tcp_mesh.h"

/* Fills m->addr, m->key and m->listener. Rank 0 listens at `at` until all have come and gives each the
 * addresses of all. */
kvs_status tcp_meet(tcp_mesh *m, const tcp_addr *at, int32_t timeout_ms, kvs_error *err);

#endif
