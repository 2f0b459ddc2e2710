// SPDX-License-Identifier: Apache-2.0
#include "tools/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/env.h"

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

// Passes on what comes through a pipe, and keeps the end of it.
class ErrorPipe {
 public:
  ErrorPipe() { SMP_INTERNAL_ASSERT(pipe2(ends_, O_CLOEXEC) == 0, std::strerror(errno)); }
  ErrorPipe(const ErrorPipe&) = delete;
  ErrorPipe& operator=(const ErrorPipe&) = delete;
  ~ErrorPipe() {
    finish();
    close(ends_[0]);
  }

  int write_end() const { return ends_[1]; }

  // Once the command has the other end.
  void start() {
    close(std::exchange(ends_[1], -1));
    thread_ = std::thread([this] { pass_on(); });
  }

  // When the command has ended; another process that it has left may have the other end still.
  std::string finish() {
    ended_ = true;
    if (thread_.joinable()) thread_.join();
    return tail_;
  }

 private:
  static constexpr size_t kTail = 8 << 10;
  static constexpr int kLookAround = 50;  // ms

  void pass_on() {
    std::array<char, 4096> bytes;
    for (;;) {
      pollfd readable{ends_[0], POLLIN, 0};
      const bool last = ended_;
      if (poll(&readable, 1, kLookAround) <= 0) {
        if (last) return;
        continue;
      }
      const ssize_t count = read(ends_[0], bytes.data(), bytes.size());
      if (count <= 0) return;
      tail_.append(bytes.data(), static_cast<size_t>(count));
      if (tail_.size() > 2 * kTail) tail_.erase(0, tail_.size() - kTail);
      for (ssize_t done = 0; done < count;) {
        const ssize_t written = write(STDERR_FILENO, bytes.data() + done, count - done);
        if (written <= 0) break;  // stderr is gone; there is nowhere to say so
        done += written;
      }
    }
  }

  int ends_[2];
  std::atomic<bool> ended_{false};
  std::string tail_;  // of the thread, until it has ended
  std::thread thread_;
};

// In the child: becomes the command. Returns only if it cannot.
void become(char* const* arguments, char** environment, const sigset_t& mask, pid_t parent,
            int errors) {
  // The launcher may be killed by what it cannot catch; the ranks shall not outlive it.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  dup2(errors, STDERR_FILENO);
  environ = environment;
  execvp(arguments[0], arguments);
}

pid_t spawn(const LaunchCommand& command, const sigset_t& child_mask, int errors) {
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
    become(arguments.data(), environment.data(), child_mask, parent, errors);
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

// Whether a path is that of a file that can be executed.
bool is_program(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

int exit_status_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

}  // namespace

void check_program(const std::string& program) {
  if (program.find('/') != std::string::npos) {
    SMP_CHECK(is_program(program), "smprun: the program ", program,
              std::filesystem::exists(program) ? " cannot be executed" : " does not exist",
              ". Give the path of an executable file.");
    return;
  }
  std::istringstream folders(core::env("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (is_program(std::filesystem::path(folder) / program)) return;
  }
  core::fail<Error>("smprun: the program ", program, " is not in PATH. Give its path, ./", program,
                    " for one in this folder.");
}

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
  ErrorPipe errors;
  const pid_t child = spawn(command, before, errors.write_end());
  errors.start();
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
  result.error_tail = errors.finish();
  // As a shell says of a command that a signal has ended.
  if (result.forwarded_signal != 0) result.exit_status = 128 + result.forwarded_signal;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return result;
}

}  // namespace smp::tools
