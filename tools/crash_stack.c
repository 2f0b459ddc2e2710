// SPDX-License-Identifier: Apache-2.0
// Writes the stack of the thread whose fault ends a program to stderr, where the program is started
// with this library in LD_PRELOAD. A function that its file does not export is a place in the file,
// "gpt(+0x12ab)": `addr2line -fCpe gpt 0x12ab` names it.
#define _GNU_SOURCE
#include <execinfo.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

/// Only calls that are safe in a handler. The signal then ends the program as ever.
static void show(int fault) {
  static const char head[] = "crash_stack:\n";
  void* frames[100];
  if (write(STDERR_FILENO, head, sizeof head - 1) < 0) return;
  backtrace_symbols_fd(frames, backtrace(frames, 100), STDERR_FILENO);
  raise(fault);
}

__attribute__((constructor)) static void install(void) {
  void* frame;
  backtrace(&frame, 1);  // loads its library, which a handler may not
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = show;
  action.sa_flags = (int)SA_RESETHAND;
  for (size_t i = 0; i < sizeof faults / sizeof *faults; ++i) sigaction(faults[i], &action, NULL);
}
