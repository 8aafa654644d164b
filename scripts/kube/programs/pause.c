// SPDX-License-Identifier: Apache-2.0

// The process that holds a pod's namespaces while its containers come and go. It is the pod's first process, so it also
// inherits what containers leave behind, and must take note of the end of each.
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>

int main(void) {
  sigset_t awaited;
  sigemptyset(&awaited);
  sigaddset(&awaited, SIGTERM);
  sigaddset(&awaited, SIGINT);
  sigaddset(&awaited, SIGCHLD);
  sigprocmask(SIG_BLOCK, &awaited, NULL);
  for (;;) {
    int signal = 0;
    sigwait(&awaited, &signal);
    if (signal != SIGCHLD) {
      return 0;
    }
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
  }
}
