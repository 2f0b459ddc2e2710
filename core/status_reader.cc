// SPDX-License-Identifier: Apache-2.0
#include "core/status_reader.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "core/stack_request.h"
#include "core/status.h"
#include "core/status_mapping.h"
#include "core/text.h"

namespace smp::core {
namespace {

namespace fs = std::filesystem;

using Kind = ThreadState::Kind;

// The content of a rank's memory, and whose it is.
struct Line {
  JobStatus job;  // without ranks
  pid_t thread = 0;
  RankStatus status;
};

double seconds_since(int64_t time) {
  const int64_t now = Status::Clock::now().time_since_epoch().count();
  return std::max(0.0, 1e-9 * (static_cast<double>(now) - static_cast<double>(time)));
}

std::string text_in(const StatusMemory::SharedLabel& where) {
  Label::Words words{};
  for (size_t i = 0; i < words.size(); ++i) words[i] = get(where[i]);
  return printable(Label(words).text());
}

// Reads the status of a rank of `ranks`; others that it names are none.
RankStatus status_in(const StatusMemory& memory, size_t ranks) {
  const auto is_rank = [&](int rank) { return rank >= 0 && static_cast<size_t>(rank) < ranks; };
  RankStatus status;
  status.rank = memory.owner.rank;
  status.process = memory.owner.process;
  const StatusMemory::Doing& doing = memory.doing;
  read_part(doing, [&] {
    status.step = get(doing.step);
    status.action = text_in(doing.action);
    status.action_seconds = seconds_since(get(doing.since));
  });
  const StatusMemory::Waiting& waiting = memory.waiting;
  read_part(waiting, [&] {
    const size_t count = std::min<size_t>(get(waiting.count), ranks);
    const size_t told = std::min(count, waiting.ranks.size());
    status.waits_for.clear();
    for (size_t i = 0; i < told; ++i) {
      const int rank = get(waiting.ranks[i]);
      if (is_rank(rank)) status.waits_for.push_back(rank);
    }
    status.more = static_cast<int>(count - told);
    status.wait = text_in(waiting.call);
    status.wait_seconds = seconds_since(get(waiting.since));
  });
  const int64_t warned = get(memory.owner.warned);
  if (warned != 0) status.warned_seconds = seconds_since(warned);
  return status;
}

// Nothing of memory that is no rank's of its job.
std::optional<Line> line_in(const StatusMapping& mapping) {
  const StatusMemory& memory = *mapping.memory;
  const std::vector<std::string>& texts = mapping.texts;
  Line line;
  line.job.id = texts[0];
  line.job.name = texts[1];
  line.job.program = texts[2];
  line.job.hosts.assign(texts.begin() + StatusMapping::kFewestTexts, texts.end());
  line.job.seconds = seconds_since(memory.owner.started);
  line.thread = memory.owner.thread;
  line.status = status_in(memory, line.job.hosts.size());
  const int rank = line.status.rank;
  const bool is_rank = rank >= 0 && static_cast<size_t>(rank) < line.job.hosts.size();
  return is_rank ? std::optional(std::move(line)) : std::nullopt;
}

std::vector<Line> read_lines() {
  std::vector<Line> lines;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    pid_t process = 0;
    const auto [end, problem] = std::from_chars(name.data(), name.data() + name.size(), process);
    struct stat folder {};
    if (problem != std::errc{} || *end != '\0') continue;
    if (stat(entry.path().c_str(), &folder) != 0 || folder.st_uid != geteuid()) continue;
    for (const StatusMapping& mapping : map_statuses(process)) {
      if (auto line = line_in(mapping)) lines.push_back(std::move(*line));
    }
  }
  return lines;
}

// --- The kernel's view ---

// The letter of its state and the ticks of processor time.
struct Stat {
  char state = 'X';
  int64_t ticks = 0;
};

Stat read_stat(const std::string& path) {
  std::ostringstream read;
  read << std::ifstream(path).rdbuf();  // throws nothing where the process ends meanwhile
  const std::string text = read.str();
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  Stat stat;
  std::string skipped;
  int64_t user = 0, system = 0;
  fields >> stat.state;
  for (int i = 0; i < 10; ++i) fields >> skipped;
  fields >> user >> system;
  stat.ticks = user + system;
  return stat;
}

std::string folder_of(const Line& line) {
  return "/proc/" + std::to_string(line.status.process) + "/task/" + std::to_string(line.thread);
}

// Other threads of a process compute for its rank; where ranks are threads, each for its own.
int64_t ticks_of(const Line& line) {
  const bool is_process = line.thread == line.status.process;
  return read_stat(is_process ? "/proc/" + std::to_string(line.status.process) + "/stat"
                              : folder_of(line) + "/stat")
      .ticks;
}

// Where programs that do not go on are found.
std::string system_call_name(long number) {
  static const std::map<long, const char*> names = {
      {SYS_read, "read"},           {SYS_write, "write"},
      {SYS_pread64, "pread"},       {SYS_pwrite64, "pwrite"},
      {SYS_readv, "readv"},         {SYS_writev, "writev"},
      {SYS_openat, "open"},         {SYS_fsync, "fsync"},
      {SYS_fdatasync, "fdatasync"}, {SYS_flock, "flock"},
      {SYS_fcntl, "fcntl"},         {SYS_futex, "futex"},
      {SYS_nanosleep, "nanosleep"}, {SYS_clock_nanosleep, "nanosleep"},
      {SYS_wait4, "wait"},          {SYS_waitid, "wait"},
      {SYS_recvfrom, "recv"},       {SYS_recvmsg, "recv"},
      {SYS_sendto, "send"},         {SYS_sendmsg, "send"},
      {SYS_accept4, "accept"},      {SYS_connect, "connect"},
      {SYS_ppoll, "poll"},          {SYS_pselect6, "select"},
      {SYS_epoll_pwait, "epoll"},   {SYS_rt_sigtimedwait, "sigwait"},
#ifdef SYS_poll
      {SYS_poll, "poll"},           {SYS_select, "select"},
      {SYS_epoll_wait, "epoll"},    {SYS_accept, "accept"},
      {SYS_pause, "pause"},         {SYS_open, "open"},
#endif
  };
  const auto found = names.find(number);
  return found == names.end() ? "system call " + std::to_string(number) : found->second;
}

// Empty where the kernel does not let this user see it.
std::string system_call_of(const Line& line) {
  long number = -1;
  return std::ifstream(folder_of(line) + "/syscall") >> number && number >= 0
             ? system_call_name(number)
             : "";
}

int64_t swapped_mib(pid_t process) {
  std::ifstream in("/proc/" + std::to_string(process) + "/status");
  int64_t kib = 0;
  for (std::string word; in >> word;) {
    if (word == "VmSwap:" && in >> kib) break;
  }
  return kib / 1024;
}

ThreadState state_of(const Line& line) {
  ThreadState state;
  switch (read_stat(folder_of(line) + "/stat").state) {
    case 'R':
      return state;
    case 'T':
    case 't':
      state.kind = Kind::kStopped;
      return state;
    case 'D':
      state.kind = Kind::kBlocked;
      state.swapped_mib = swapped_mib(line.status.process);
      break;
    case 'X':
    case 'Z':
      state.kind = Kind::kEnded;
      return state;
    default:
      state.kind = Kind::kSleeps;
  }
  state.in = system_call_of(line);
  return state;
}

// A sleeping thread may be asleep only briefly: it counts as computing if its processor time grows,
// or if its rank has just begun an action.
void find_states(std::vector<Line>& lines) {
  constexpr std::chrono::milliseconds kPeriod{200};
  const int64_t kWorth = sysconf(_SC_CLK_TCK) / 20;  // a quarter of the period
  std::map<Line*, int64_t> sleepers;
  for (Line& line : lines) {
    line.status.state = state_of(line);
    if (line.status.state.kind != Kind::kSleeps || line.status.is_waiting()) continue;
    if (line.status.action_seconds < std::chrono::duration<double>(kPeriod).count()) {
      line.status.state = ThreadState();
    } else {
      sleepers[&line] = ticks_of(line);
    }
  }
  if (sleepers.empty()) return;
  std::this_thread::sleep_for(kPeriod);
  for (const auto& [line, before] : sleepers) {
    if (ticks_of(*line) - before >= kWorth) line->status.state = ThreadState();
  }
}

// A rank of this host whose memory is gone has ended.
void add_ended(JobStatus& job) {
  const std::string& here = job.hosts.at(static_cast<size_t>(job.ranks.front().rank));
  for (size_t rank = 0; rank < job.hosts.size(); ++rank) {
    const int number = static_cast<int>(rank);
    if (job.hosts[rank] != here || job.find(number) != nullptr) continue;
    RankStatus ended;
    ended.rank = number;
    ended.state.kind = Kind::kEnded;
    job.ranks.push_back(ended);
  }
}

std::vector<JobStatus> to_jobs(std::vector<Line> lines) {
  find_states(lines);
  // A job with the same id and other hosts is another job.
  std::map<std::pair<std::string, std::vector<std::string>>, JobStatus> by_id;
  for (const Line& line : lines) {
    JobStatus& job = by_id.try_emplace({line.job.id, line.job.hosts}, line.job).first->second;
    job.seconds = std::max(job.seconds, line.job.seconds);
    job.ranks.push_back(line.status);
  }
  std::vector<JobStatus> jobs;
  for (auto& [id, job] : by_id) {
    add_ended(job);
    std::sort(job.ranks.begin(), job.ranks.end(),
              [](const RankStatus& a, const RankStatus& b) { return a.rank < b.rank; });
    jobs.push_back(std::move(job));
  }
  std::sort(jobs.begin(), jobs.end(),
            [](const JobStatus& a, const JobStatus& b) { return a.name < b.name; });
  return jobs;
}

}  // namespace

std::vector<JobStatus> read_jobs() { return to_jobs(read_lines()); }

std::optional<JobStatus> read_own_job() {
  const Status* const own = this_status();
  if (own == nullptr) return std::nullopt;
  std::vector<Line> lines = read_lines();
  const auto others = std::remove_if(
      lines.begin(), lines.end(), [&](const Line& line) { return line.job.id != own->job_id(); });
  lines.erase(others, lines.end());
  if (lines.empty()) return std::nullopt;
  return to_jobs(std::move(lines)).front();
}

WaitDiagnosis diagnose_wait() {
  auto job = read_own_job();
  if (!job) return {};
  ask_for_stacks(*job);
  const int rank = this_status()->rank();
  return {wait_chain(*job, rank), stall_cause(*job, rank)};
}

}  // namespace smp::core
