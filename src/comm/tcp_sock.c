/* comm/tcp_sock.c: see tcp_sock.h. */
#include "comm/tcp_sock.h"
#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/err.h"

/* ---- addresses --------------------------------------------------------------------------------- */

static const char k_scheme[] = "tcp://";

static kvs_status not_an_address(const char *text, kvs_error *err)
{
    return err_set(err, KVS_INVALID, "\"%.100s\" is no address: use tcp://HOST:PORT, PORT 1 to 65535",
                   text);
}

/* Cuts HOST and PORT out of the text. */
static kvs_status split_text(const char *text, char *host, size_t cap, long *port, kvs_error *err)
{
    const size_t n_scheme = sizeof k_scheme - 1;
    if (text == NULL || strncmp(text, k_scheme, n_scheme) != 0) {
        return not_an_address(text != NULL ? text : "", err);
    }
    const char *begin = text + n_scheme;
    const char *colon = strrchr(begin, ':');
    const char *end = colon;
    if (colon != NULL && begin[0] == '[') {
        begin++;
        end = colon - 1;
        if (end <= begin || *end != ']') {
            return not_an_address(text, err);
        }
    }
    if (colon == NULL || end == begin || (size_t)(end - begin) >= cap || strlen(colon + 1) > 5) {
        return not_an_address(text, err);
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    for (const char *p = colon + 1; *p != '\0'; p++) {
        if (*p < '0' || *p > '9') {
            return not_an_address(text, err);
        }
        *port = 10 * *port + (*p - '0');
    }
    return *port >= 1 && *port <= 65535 ? KVS_OK : not_an_address(text, err);
}

kvs_status tcp_resolve(const char *text, tcp_addr *out, kvs_error *err)
{
    char host[256];
    long port = 0;
    TRY(split_text(text, host, sizeof host, &port, err));
    const struct addrinfo want = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    const int rc = getaddrinfo(host, NULL, &want, &list);
    if (rc != 0) {
        return err_set(err, KVS_INVALID, "the host \"%.100s\" has no address: %s", host,
                       gai_strerror(rc));
    }
    const struct addrinfo *best = list;
    for (const struct addrinfo *i = list; i != NULL; i = i->ai_next) {
        if (i->ai_family == AF_INET) {
            best = i;
            break;
        }
    }
    memset(out, 0, sizeof *out);
    memcpy(&out->at, best->ai_addr, best->ai_addrlen);
    out->len = best->ai_addrlen;
    freeaddrinfo(list);
    tcp_addr_set_port(out, (uint16_t)port);
    return KVS_OK;
}

/* Where the port of an address is, in network order. */
static uint16_t *port_of(tcp_addr *a)
{
    return a->at.ss_family == AF_INET6
               ? &((struct sockaddr_in6 *)(void *)&a->at)->sin6_port
               : &((struct sockaddr_in *)(void *)&a->at)->sin_port;
}

void tcp_addr_set_port(tcp_addr *a, uint16_t port)
{
    *port_of(a) = htons(port);
}

uint16_t tcp_addr_port(const tcp_addr *a)
{
    tcp_addr copy = *a;
    return ntohs(*port_of(&copy));
}

void tcp_addr_text(const tcp_addr *a, char *text, size_t cap)
{
    char host[64];
    const bool is_v6 = a->at.ss_family == AF_INET6;
    if (getnameinfo((const struct sockaddr *)(const void *)&a->at, a->len, host, sizeof host, NULL, 0,
                    NI_NUMERICHOST) != 0) {
        snprintf(host, sizeof host, "?");
    }
    snprintf(text, cap, "%s%s%s:%u", is_v6 ? "[" : "", host, is_v6 ? "]" : "",
             (unsigned)tcp_addr_port(a));
}

/* ---- sockets ----------------------------------------------------------------------------------- */

static int new_socket(int family)
{
    const int on = 1;
    const int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -errno;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

void tcp_close(int fd)
{
    if (fd >= 0) {
        (void)close(fd);
    }
}

int tcp_listen(const tcp_addr *at)
{
    const int on = 1;
    const int fd = new_socket(at->at.ss_family);
    if (fd < 0) {
        return fd;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (const struct sockaddr *)(const void *)&at->at, at->len) != 0 ||
        listen(fd, SOMAXCONN) != 0) {
        const int code = errno;
        tcp_close(fd);
        return -code;
    }
    return fd;
}

int tcp_accept(int listener)
{
    const int on = 1;
    const int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        return errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED ? -EAGAIN : -errno;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* Waits for events on one socket; 0 or -ETIMEDOUT. */
static int wait_for(int fd, short events, int64_t until)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        const int n = poll(&p, 1, tcp_ms_until(until));
        if (n > 0) {
            return 0;
        }
        if (n == 0 && clock_ns() >= until) {
            return -ETIMEDOUT;
        }
        if (n < 0 && errno != EINTR) {
            return -errno;
        }
    }
}

/* A socket that tries a port in the range the system takes its own ports from may meet itself. */
static bool met_itself(int fd)
{
    tcp_addr own;
    tcp_addr peer;
    return tcp_own_addr(fd, &own) == 0 && tcp_peer_addr(fd, &peer) == 0 && own.len == peer.len &&
           memcmp(&own.at, &peer.at, own.len) == 0;
}

int tcp_connect(const tcp_addr *to, int64_t until)
{
    const int fd = new_socket(to->at.ss_family);
    if (fd < 0) {
        return fd;
    }
    int code = 0;
    if (connect(fd, (const struct sockaddr *)(const void *)&to->at, to->len) != 0) {
        code = errno;
    }
    if (code == EINPROGRESS || code == EINTR) {
        socklen_t n = sizeof code;
        const int waited = wait_for(fd, POLLOUT, until);
        if (waited < 0) {
            code = -waited;
        } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0) {
            code = errno;
        }
    }
    if (code == 0 && met_itself(fd)) {
        code = ECONNREFUSED;
    }
    if (code != 0) {
        tcp_close(fd);
        return -code;
    }
    return fd;
}

int tcp_own_addr(int fd, tcp_addr *out)
{
    socklen_t n = sizeof out->at;
    memset(out, 0, sizeof *out);
    const int rc = getsockname(fd, (struct sockaddr *)(void *)&out->at, &n);
    out->len = n;
    return rc == 0 ? 0 : -errno;
}

int tcp_peer_addr(int fd, tcp_addr *out)
{
    socklen_t n = sizeof out->at;
    memset(out, 0, sizeof *out);
    const int rc = getpeername(fd, (struct sockaddr *)(void *)&out->at, &n);
    out->len = n;
    return rc == 0 ? 0 : -errno;
}

/* ---- moving bytes ------------------------------------------------------------------------------ */

int tcp_ms_until(int64_t until)
{
    const int64_t left = until - clock_ns();
    if (left <= 0) {
        return 0;
    }
    const int64_t ms = (left + 999999) / 1000000;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

int64_t tcp_send_some(int fd, struct iovec *v, int n)
{
    const struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)n};
    const ssize_t sent = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
        return sent;
    }
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

int64_t tcp_recv_some(int fd, void *p, size_t n)
{
    const ssize_t got = recv(fd, p, n, MSG_DONTWAIT);
    if (got > 0) {
        return got;
    }
    if (got == 0) {
        return -EPIPE;
    }
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

int tcp_send_all(int fd, const void *p, size_t n, int64_t until)
{
    const unsigned char *at = p;
    while (n > 0) {
        struct iovec v = {.iov_base = (void *)(uintptr_t)at, .iov_len = n};
        const int64_t sent = tcp_send_some(fd, &v, 1);
        if (sent < 0) {
            return (int)sent;
        }
        at += sent;
        n -= (size_t)sent;
        if (n > 0) {
            const int rc = wait_for(fd, POLLOUT, until);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

int tcp_recv_all(int fd, void *p, size_t n, int64_t until)
{
    unsigned char *at = p;
    while (n > 0) {
        const int64_t got = tcp_recv_some(fd, at, n);
        if (got < 0) {
            return (int)got;
        }
        at += got;
        n -= (size_t)got;
        if (n > 0) {
            const int rc = wait_for(fd, POLLIN, until);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}
