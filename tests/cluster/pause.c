// The process that holds a pod's namespaces open, and the two ends of a test of its network.
//   pause                  waits for SIGTERM
//   pause listen PORT      greets everyone who connects, until SIGTERM
//   pause connect IP PORT  prints the greeting; fails after three seconds of silence
//   pause reach IP PORT    connects and says no more
// It is linked statically: its image holds this one file.
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal_number) {
  (void)signal_number;
  _exit(0);
}

// As process 1 of a shared process namespace it inherits orphans, and must bury them.
static void reap(int signal_number) {
  (void)signal_number;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

static int fail(const char *what) {
  perror(what);
  return 1;
}

static int greet(int port) {
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(port)};
  int yes = 1;
  int door = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(door, (struct sockaddr *)&here, sizeof here) != 0) return fail("bind");
  if (listen(door, 16) != 0) return fail("listen");
  for (;;) {
    int guest = accept(door, NULL, NULL);
    if (guest < 0) continue;
    if (write(guest, "hello\n", 6) != 6) perror("write");
    close(guest);
  }
}

static int visit(const char *address, int port, int listens) {
  struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(port)};
  if (inet_pton(AF_INET, address, &there.sin_addr) != 1) return fail(address);
  // SIGALRM ends the process: its exit status then says that nobody answered.
  alarm(3);
  int wire = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(wire, (struct sockaddr *)&there, sizeof there) != 0) return fail("connect");
  if (!listens) return 0;
  char text[64];
  ssize_t length = read(wire, text, sizeof text);
  if (length <= 0) return fail("read");
  return fwrite(text, 1, length, stdout) == (size_t)length ? 0 : 1;
}

int main(int count, char **words) {
  signal(SIGTERM, leave);
  signal(SIGINT, leave);
  if (count == 3 && strcmp(words[1], "listen") == 0) return greet(atoi(words[2]));
  if (count == 4 && strcmp(words[1], "connect") == 0) {
    return visit(words[2], atoi(words[3]), 1);
  }
  if (count == 4 && strcmp(words[1], "reach") == 0) return visit(words[2], atoi(words[3]), 0);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
