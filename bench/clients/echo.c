/* The load of the echo tables: connections with one message in flight each, until the time is over.

   echo HOST PORT CONNECTIONS BYTES WARM_UP_S SECONDS      (HOST "unix" and a path for PORT: a unix socket)

   Every byte that comes back is held against what was sent. Prints one JSON object: messages, the latencies' sum,
   sum of squares, least and greatest in ns, and their histogram in steps of 10 us, of the time behind the warm-up.
   In C because ten Python clients on a core stop at 65,000 messages/s, whatever the server. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define STEP_NS 10000
#define STEPS 200000 /* two seconds; what takes longer is counted in the last */
#define MARK_BYTES 16
#define PATIENCE_NS 5000000000u

typedef struct {
    int fd;
    size_t sent, received;
    uint64_t number, started_ns;
    int waits_to_send;
    unsigned char mark[MARK_BYTES];
} Connection;

static size_t message_bytes;
static unsigned char *message, *incoming;
static int poll_fd, in_flight;
static uint64_t begin_ns, end_ns;
static uint64_t messages, least_ns = UINT64_MAX, greatest_ns;
static double sum_ns, sum_of_squares_ns;
static uint32_t histogram[STEPS];

static void fail(const char *what) {
    fprintf(stderr, "echo client: %s: %s\n", what, errno ? strerror(errno) : "the answer is wrong");
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int connect_to(const char *host, const char *port) {
    int fd, yes = 1;
    if (strcmp(host, "unix") == 0) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        strncpy(at.sun_path, port, sizeof at.sun_path - 1);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) fail(port);
    } else {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
        inet_pton(AF_INET, host, &at.sin_addr);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) fail(port);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* The message is the same for all but for its first bytes, which say whose and which it is. */
static void send_rest(Connection *connection) {
    while (connection->sent < message_bytes) {
        struct iovec parts[2];
        int count = 0;
        size_t at = connection->sent;
        if (at < MARK_BYTES) parts[count++] = (struct iovec){connection->mark + at, MARK_BYTES - at};
        size_t from = at < MARK_BYTES ? MARK_BYTES : at;
        if (from < message_bytes) parts[count++] = (struct iovec){message + from, message_bytes - from};
        struct msghdr head = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t n = sendmsg(connection->fd, &head, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) fail("sending");
        int waits = n < 0;
        if (waits != connection->waits_to_send) {
            struct epoll_event event = {.events = EPOLLIN | (waits ? EPOLLOUT : 0u), .data.ptr = connection};
            epoll_ctl(poll_fd, EPOLL_CTL_MOD, connection->fd, &event);
            connection->waits_to_send = waits;
        }
        if (waits) return;
        connection->sent += (size_t)n;
    }
}

static void start_message(Connection *connection, uint64_t now) {
    uint64_t whose = (uint64_t)connection->fd;
    memcpy(connection->mark, &whose, 8);
    memcpy(connection->mark + 8, &connection->number, 8);
    connection->number++;
    connection->sent = connection->received = 0;
    connection->started_ns = now;
    send_rest(connection);
}

static void finish_message(Connection *connection, uint64_t now) {
    if (connection->started_ns >= begin_ns && now < end_ns) {
        uint64_t took = now - connection->started_ns;
        messages++;
        sum_ns += (double)took;
        sum_of_squares_ns += (double)took * (double)took;
        if (took < least_ns) least_ns = took;
        if (took > greatest_ns) greatest_ns = took;
        uint64_t step = took / STEP_NS;
        histogram[step < STEPS ? step : STEPS - 1]++;
    }
    if (now < end_ns)
        start_message(connection, now);
    else
        in_flight--;
}

static void receive(Connection *connection) {
    size_t missing = message_bytes - connection->received;
    /* One byte more than may come: what nobody sent is an error too. */
    ssize_t n = recv(connection->fd, incoming, missing + 1, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) fail("receiving");
    errno = 0;
    if (n == 0 || (size_t)n > missing) fail("the server closed, or sent too much");
    size_t at = connection->received, stop = at + (size_t)n, from = at;
    if (stop > connection->sent) fail("came back before it was sent");
    if (at < MARK_BYTES) {
        size_t marked = (stop < MARK_BYTES ? stop : MARK_BYTES) - at;
        if (memcmp(incoming, connection->mark + at, marked)) fail("comparing");
        from = at + marked;
    }
    if (memcmp(incoming + (from - at), message + from, stop - from)) fail("comparing");
    connection->received = stop;
    if (stop == message_bytes) finish_message(connection, now_ns());
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: echo HOST PORT CONNECTIONS BYTES WARM_UP_S SECONDS\n");
        return 2;
    }
    int count = atoi(argv[3]);
    message_bytes = (size_t)atol(argv[4]);
    double warm_up_s = atof(argv[5]), seconds = atof(argv[6]);
    if (count < 1 || message_bytes < MARK_BYTES || seconds <= 0) {
        fprintf(stderr, "echo client: at least one connection, 16 bytes and some time are needed\n");
        return 2;
    }
    message = malloc(message_bytes);
    incoming = malloc(message_bytes + 1);
    uint64_t state = 1;
    for (size_t i = 0; i < message_bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        message[i] = (unsigned char)(state >> 56);
    }
    poll_fd = epoll_create1(0);
    Connection *connections = calloc((size_t)count, sizeof *connections);
    for (int i = 0; i < count; i++) {
        connections[i].fd = connect_to(argv[1], argv[2]);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &connections[i]};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, connections[i].fd, &event);
    }
    uint64_t start = now_ns();
    begin_ns = start + (uint64_t)(warm_up_s * 1e9);
    end_ns = begin_ns + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < count; i++) start_message(&connections[i], start);
    struct epoll_event events[256];
    in_flight = count;
    /* Nobody is cut off in the middle; a server that does not give back its last messages has failed. */
    while (in_flight) {
        if (now_ns() > end_ns + PATIENCE_NS) {
            errno = ETIMEDOUT;
            fail("waiting for the last messages");
        }
        int ready = epoll_wait(poll_fd, events, 256, 100);
        for (int i = 0; i < ready; i++) {
            Connection *connection = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) send_rest(connection);
            if (events[i].events & ~(uint32_t)EPOLLOUT) receive(connection);
        }
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"messages\": %lu, \"seconds\": %.6f, \"client_cpu_s\": %.3f, \"sum_ns\": %.0f, \"sum_of_squares_ns\": %.0f, "
           "\"least_ns\": %lu, \"greatest_ns\": %lu, \"step_ns\": %d, \"histogram\": [",
           (unsigned long)messages, seconds, cpu_s, sum_ns, sum_of_squares_ns, (unsigned long)(messages ? least_ns : 0),
           (unsigned long)greatest_ns, STEP_NS);
    const char *comma = "";
    for (int i = 0; i < STEPS; i++)
        if (histogram[i]) {
            printf("%s[%d, %u]", comma, i, histogram[i]);
            comma = ", ";
        }
    printf("]}\n");
    return 0;
}
