// SPDX-License-Identifier: Apache-2.0
#include "tools/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/descriptor.h"
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

// Passes on the bytes of a pipe, and keeps the end of it.
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
      // It fails where stderr is gone; there is nowhere to say so.
      static_cast<void>(core::write_fully(STDERR_FILENO, bytes.data(), count));
    }
  }

  int ends_[2];
  std::atomic<bool> ended_{false};
  std::string tail_;  // tail of the output, the thread's until it has ended
  std::thread thread_;
};

// How a command is started.
struct Start {
  sigset_t mask;  // the signals that stay away from it
  int ending;     // the one that ends it
};

Start start_of(const LaunchCommand& command, const sigset_t& mask) {
  Start start{mask, SIGKILL};
  if (command.outlives_sigterm) sigaddset(&start.mask, SIGTERM);
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    if (!sigismember(&start.mask, signal)) start.ending = signal;
  }
  return start;
}

// In the child: becomes the command. Returns only if it cannot.
void become(char* const* arguments, char** environment, const Start& start, pid_t parent,
            int errors) {
  // The launcher may be killed by a signal that it cannot catch; the ranks shall not outlive it.
  prctl(PR_SET_PDEATHSIG, start.ending);
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, &start.mask, nullptr);
  dup2(errors, STDERR_FILENO);
  environ = environment;
  execvp(arguments[0], arguments);
}

pid_t spawn(const LaunchCommand& command, const Start& start, int errors) {
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
    become(arguments.data(), environment.data(), start, parent, errors);
    error = errno;
    _exit(write(report[1], &error, sizeof error) == sizeof error ? 127 : 126);
  }
  close(report[1]);
  while (read(report[0], &error, sizeof error) < 0 && errno == EINTR) {
  }
  close(report[0]);
  if (child > 0 && error != 0) waitpid(child, nullptr, 0);
  SMP_CHECK(
      error != ENOENT, words[0],
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

using Clock = std::chrono::steady_clock;

// How long a command that was told to end may take; mpirun takes some seconds.
constexpr std::chrono::seconds kLongestEnd{30};
// How long processes that it has left may take by themselves: ranks see within two seconds that
// mpirun is gone.
constexpr std::chrono::seconds kLongestFarewell{3};

// The signal that comes first until then, and its sender; 0: none.
int next_signal(const sigset_t& signals, std::optional<Clock::time_point> deadline,
                siginfo_t& info) {
  for (;;) {
    int signal = 0;
    if (deadline) {
      const auto left = std::max(*deadline - Clock::now(), Clock::duration(0));
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
      const timespec time{seconds.count(), (left - seconds).count()};
      signal = sigtimedwait(&signals, &info, &time);
    } else {
      signal = sigwaitinfo(&signals, &info);
    }
    if (signal > 0) return signal;
    if (errno != EINTR) return 0;
  }
}

// Waits for a command and works meanwhile.
class RunningCommand {
 public:
  RunningCommand(const Supervision& supervision, pid_t child, int ending_signal)
      : supervision_(supervision), child_(child), ending_signal_(ending_signal) {
    if (supervision.start_limit.count() > 0) late_ = Clock::now() + supervision.start_limit;
  }

  // `signals`: those that end a job, and SIGCHLD.
  ProcessResult wait(const sigset_t& signals) {
    while (!has_ended_) {
      siginfo_t info{};
      const int signal = next_signal(signals, next_deadline(), info);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal > 0) {
        take(signal, info);
      }
      look_at_the_time();
    }
    return std::move(result_);
  }

 private:
  std::optional<Clock::time_point> next_deadline() const {
    std::optional<Clock::time_point> next;
    for (const auto& deadline : {late_, grace_, kill_}) {
      if (deadline && (!next || *deadline < *next)) next = deadline;
    }
    return next;
  }

  // Whether that time has come; once.
  static bool is_over(std::optional<Clock::time_point>& deadline) {
    if (!deadline || Clock::now() < *deadline) return false;
    deadline.reset();
    return true;
  }

  void look_at_the_time() {
    if (has_ended_) return;
    const core::Refusal too_late = is_over(late_) ? supervision_.why_late() : std::nullopt;
    if (too_late) {
      result_.ended_because = *too_late;
      end(ending_signal_);
    }
    if (is_over(grace_)) {
      result_.forwarded_signal = SIGTERM;
      result_.ended_because = "the job has not stopped by itself within \"preempt_seconds\"";
      end(ending_signal_);
    }
    if (is_over(kill_)) ::kill(child_, SIGKILL);
  }

  void take(int signal, const siginfo_t& info) {
    if (signal == SIGTERM && (result_.asked_to_stop || ask_to_stop())) return;
    result_.forwarded_signal = signal;
    const bool is_of_the_terminal = info.si_code == SI_KERNEL;  // signals the whole group
    end(is_of_the_terminal ? 0 : signal == SIGTERM ? ending_signal_ : signal);
  }

  bool ask_to_stop() {
    if (!supervision_.ask_to_stop) return false;
    const auto grace = supervision_.ask_to_stop();
    if (grace.count() == 0) return false;
    result_.asked_to_stop = true;
    grace_ = Clock::now() + grace;
    return true;
  }

  void end(int signal) {
    if (signal != 0) ::kill(child_, signal);
    if (!kill_) kill_ = Clock::now() + kLongestEnd;
  }

  // All that have ended, also those that the command has left.
  void reap() {
    int status = 0;
    for (pid_t ended = 0; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (ended != child_) continue;
      has_ended_ = true;
      result_.own_signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
      result_.exit_status =
          result_.own_signal != 0 ? 128 + result_.own_signal : WEXITSTATUS(status);
    }
  }

  const Supervision& supervision_;
  const pid_t child_;
  const int ending_signal_;
  ProcessResult result_;
  bool has_ended_ = false;
  std::optional<Clock::time_point> late_;   // when the ranks should have come
  std::optional<Clock::time_point> grace_;  // when they should have stopped
  std::optional<Clock::time_point> kill_;   // when the command should have ended
};

// A file of a process that ends meanwhile cannot be read: an iterator would throw then, and this
// operator does not.
std::string read_all(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// Whether a process is a child of this one, in its session, and lives.
bool is_own_child(const std::string& process) {
  const std::string text = read_all("/proc/" + process + "/stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream words(text.substr(name_end + 1));
  char state = ' ';
  pid_t parent = 0, group = 0, session = 0;
  words >> state >> parent >> group >> session;
  return words && state != 'Z' && parent == getpid() && session == getsid(0);
}

// Processes left behind by a command: those that it started have its variables.
std::vector<pid_t> processes_left(const std::string& variable) {
  const std::string entry = std::string(1, '\0') + variable + '\0';
  std::vector<pid_t> left;
  std::error_code ignored;
  for (const auto& file : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string process = file.path().filename().string();
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    if (!is_own_child(process)) continue;
    const std::string variables = '\0' + read_all("/proc/" + process + "/environ");
    if (variables.find(entry) != std::string::npos) left.push_back(std::atoi(process.c_str()));
  }
  return left;
}

// Ends a process with its process group, if it has one, which mpirun gives each rank.
void end_process(pid_t process) {
  if (::kill(-process, SIGKILL) != 0) ::kill(process, SIGKILL);
}

// Waits for processes that a command has left, and ends them when that takes too long.
void end_processes_left(const LaunchCommand& command) {
  constexpr std::chrono::milliseconds kBetweenLooks{20};
  if (command.environment.empty()) return;
  const auto& [name, value] = command.environment.front();
  const auto patient_until = Clock::now() + kLongestFarewell;
  while (Clock::now() < patient_until + kLongestFarewell) {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const auto left = processes_left(name + "=" + value);
    if (left.empty()) return;
    if (Clock::now() > patient_until) std::for_each(left.begin(), left.end(), end_process);
    std::this_thread::sleep_for(kBetweenLooks);
  }
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

CommandRunner::CommandRunner() {
  // A SIGCHLD that the caller ignores would take the exit status away.
  std::signal(SIGCHLD, SIG_DFL);
  // Ranks whose mpirun has ended become children of this process.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t waiting;
  sigemptyset(&waiting);
  sigaddset(&waiting, SIGCHLD);
  sigemptyset(&ending_);
  sigprocmask(SIG_BLOCK, nullptr, &children_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    const bool is_ignored = action.sa_handler == SIG_IGN;
    // mpirun would take it all the same. Blocked, it stays away.
    if (is_ignored) sigaddset(&children_, signal);
    if (!is_ignored) sigaddset(&ending_, signal);
    sigaddset(&waiting, signal);
  }
  // They wait for sigwaitinfo, so there is no handler and no race.
  sigprocmask(SIG_BLOCK, &waiting, nullptr);
}

int CommandRunner::wait(std::chrono::seconds time) const {
  siginfo_t info{};
  return next_signal(ending_, Clock::now() + time, info);
}

ProcessResult CommandRunner::run(const LaunchCommand& command, const Supervision& supervision) {
  if (const int signal = wait(std::chrono::seconds(0))) {
    ProcessResult result;
    result.exit_status = 128 + signal;
    result.forwarded_signal = signal;
    return result;
  }
  ErrorPipe errors;
  const Start start = start_of(command, children_);
  const pid_t child = spawn(command, start, errors.write_end());
  errors.start();
  sigset_t signals = ending_;
  sigaddset(&signals, SIGCHLD);
  ProcessResult result = RunningCommand(supervision, child, start.ending).wait(signals);
  if (result.exit_status != 0 || result.forwarded_signal != 0) end_processes_left(command);
  result.error_tail = errors.finish();
  // Shells report a command that a signal has ended like this.
  if (result.forwarded_signal != 0) result.exit_status = 128 + result.forwarded_signal;
  if (!result.ended_because.empty()) result.exit_status = std::max(result.exit_status, 1);
  return result;
}

}  // namespace smp::tools
