// SPDX-License-Identifier: Apache-2.0
#include "tools/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/check.h"

extern char** environ;

namespace smp::tools {
namespace {

std::vector<std::string> environment_of(const LaunchCommand& command) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    bool replaced = false;
    for (const auto& [name, value] : command.environment) {
      replaced = replaced || text.compare(0, name.size() + 1, name + "=") == 0;
    }
    if (!replaced) entries.push_back(text);
  }
  for (const auto& [name, value] : command.environment) entries.push_back(name + "=" + value);
  return entries;
}

// The null-terminated array of pointers into `words` that exec wants.
std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

// In the child: becomes the command. Returns only if it cannot.
void become(char* const* arguments, char** environment, const sigset_t& mask, pid_t parent) {
  // The launcher may be killed by what it cannot catch; the ranks shall not outlive it.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  environ = environment;
  execvp(arguments[0], arguments);
}

pid_t spawn(const LaunchCommand& command, const sigset_t& child_mask) {
  std::vector<std::string> words = command.arguments;
  std::vector<std::string> entries = environment_of(command);
  const std::vector<char*> arguments = pointers(words);
  std::vector<char*> environment = pointers(entries);
  int report[2];  // closed by a successful exec
  SMP_INTERNAL_ASSERT(pipe2(report, O_CLOEXEC) == 0, std::strerror(errno));
  const pid_t parent = getpid();
  const pid_t child = fork();
  int error = child < 0 ? errno : 0;
  if (child == 0) {
    become(arguments.data(), environment.data(), child_mask, parent);
    error = errno;
    _exit(write(report[1], &error, sizeof error) == sizeof error ? 127 : 126);
  }
  close(report[1]);
  while (read(report[0], &error, sizeof error) < 0 && errno == EINTR) {
  }
  close(report[0]);
  if (child > 0 && error != 0) waitpid(child, nullptr, 0);
  SMP_CHECK(error != ENOENT, words[0],
            ": not found in PATH. Install Open MPI (on Debian and Ubuntu: the package openmpi-bin).");
  SMP_CHECK(error == 0, words[0], ": cannot be started: ", std::strerror(error),
            ". Check what is called so in PATH; smprun --dry-run prints the command.");
  return child;
}

int exit_status_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

}  // namespace

ProcessResult run_process(const LaunchCommand& command) {
  // Blocked signals wait for sigwaitinfo, so there is no handler and no race. A SIGCHLD that the
  // caller ignores would take the exit status away.
  std::signal(SIGCHLD, SIG_DFL);
  sigset_t waited;
  sigemptyset(&waited);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&waited, signal);
  sigset_t before;
  sigprocmask(SIG_BLOCK, &waited, &before);

  ProcessResult result;
  const pid_t child = spawn(command, before);
  for (;;) {
    siginfo_t info;
    const int signal = sigwaitinfo(&waited, &info);
    if (signal == SIGCHLD) {
      int status = 0;
      if (waitpid(child, &status, WNOHANG) != child) continue;  // stopped or continued
      result.exit_status = exit_status_of(status);
      break;
    }
    if (signal > 0 && info.si_code != SI_KERNEL) {  // the terminal signals the whole group
      kill(child, signal);
    }
    if (signal > 0) result.forwarded_signal = signal;
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return result;
}

}  // namespace smp::tools
