/* comm/tcp_sock.h: the sockets of the TCP transport; private to tcp*.c.
 *
 * Every socket here is non-blocking, closed by exec, and sends small messages at once. Functions
 * answer 0 or a descriptor, or a negative errno; those that wait do so until a time of clock_ns.
 * Nothing raises a signal. */
#ifndef KVS_COMM_TCP_SOCK_H
#define KVS_COMM_TCP_SOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include "kvspan/status.h"

typedef struct tcp_addr {
    struct sockaddr_storage at;
    uint32_t len;
} tcp_addr;

enum { TCP_ADDR_TEXT = 72 };

/* "tcp://HOST:PORT" as an address; HOST a name, an IPv4 address or an IPv6 address in brackets. The
 * first IPv4 address of a name that has one. */
kvs_status tcp_resolve(const char *text, tcp_addr *out, kvs_error *err);
/* "10.0.0.1:4000" */
void tcp_addr_text(const tcp_addr *a, char *text, size_t cap);
void tcp_addr_set_port(tcp_addr *a, uint16_t port);
uint16_t tcp_addr_port(const tcp_addr *a);

/* Listens at an address; port 0: any free one. */
int tcp_listen(const tcp_addr *at);
/* The next connection to a listener; -EAGAIN when none waits. */
int tcp_accept(int listener);
int tcp_connect(const tcp_addr *to, int64_t until);
/* The addresses of a socket's own and of its other end. */
int tcp_own_addr(int fd, tcp_addr *out);
int tcp_peer_addr(int fd, tcp_addr *out);
void tcp_close(int fd); /* negative is fine */

int tcp_send_all(int fd, const void *p, size_t n, int64_t until);
/* -EPIPE: the other end closed first. */
int tcp_recv_all(int fd, void *p, size_t n, int64_t until);

/* Moves what can be moved at once and returns how much; 0: nothing now; -EPIPE: the other end closed. */
int64_t tcp_send_some(int fd, struct iovec *v, int n);
int64_t tcp_recv_some(int fd, void *p, size_t n);

/* Milliseconds from now until a time, for poll: rounded up, 0 when it is over. */
int tcp_ms_until(int64_t until);

#endif
