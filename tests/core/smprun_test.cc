// SPDX-License-Identifier: Apache-2.0
// Runs the real launcher with real processes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>

#include "tests/command.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;

using smp::testing::Outcome;

std::string last_line(const std::string& output) {
  const size_t end = output.find_last_not_of('\n');
  const size_t start = output.rfind('\n', end);
  return output.substr(start + 1, end - start);
}

size_t lines(const std::string& output) { return std::count(output.begin(), output.end(), '\n'); }

/// How many seconds mpirun lets its ranks live after SIGTERM; one, unless this says otherwise.
constexpr const char* kFarewell = "OMPI_MCA_odls_base_sigkill_timeout";

class Smprun : public ::testing::Test {
 protected:
  Smprun() : folder_(fs::path(::testing::TempDir()) / "smprun") {
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "tmp");
    setenv("TMPDIR", (folder_ / "tmp").c_str(), 1);
    setenv(kFarewell, "0", 1);
    config_ = folder_ / "smp.json";
    std::ofstream(config_) << R"({"partitions": 2})";
  }

  static Outcome run(const std::string& shell_command) {
    return smp::testing::run_command(shell_command + " 2>&1");
  }

  std::string command(const std::string& mode, const std::string& options = "") const {
    return "tools/smprun_bin --config " + config_.string() + options + " tests/core/failing_rank " +
           folder_.string() + " " + mode;
  }

  // Whether the process that rank `rank` wrote down still runs.
  bool runs(int rank) const {
    std::ifstream in(folder_ / ("pid." + std::to_string(rank)));
    pid_t process = 0;
    EXPECT_TRUE(in >> process) << "rank " << rank << " never started";
    return kill(process, 0) == 0;
  }

  // mpirun keeps its own session folder here, which it removes itself.
  bool left_a_folder() const {
    for (const auto& entry : fs::directory_iterator(folder_ / "tmp")) {
      if (entry.path().filename().string().rfind("smprun-", 0) == 0) return true;
    }
    return false;
  }

  fs::path folder_;
  fs::path config_;
};

TEST_F(Smprun, HandsTheParametersToTheRanks) {
  const Outcome outcome = run(command("pass"));
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_EQ(outcome.output, "{\"partitions\":2}\n{\"partitions\":2}\n");
  EXPECT_FALSE(left_a_folder());
}

TEST_F(Smprun, NamesTheFirstCauseLast) {
  const Outcome outcome = run(command("record"));
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  EXPECT_EQ(last_line(outcome.output),
            "smprun: first cause: rank 1: the loss of microbatch 3 is not finite");
  EXPECT_LT(lines(outcome.output), 15) << outcome.output;
  EXPECT_LT(outcome.seconds, 30) << "the rank that waits was not ended";
  EXPECT_FALSE(runs(0));
  EXPECT_FALSE(left_a_folder());
}

TEST_F(Smprun, ExplainsARankThatLeftNoMessage) {
  const Outcome outcome = run(command("crash"));
  EXPECT_EQ(outcome.status, 139) << outcome.output;
  // mpirun names the rank, unless all have ended before it looks.
  EXPECT_THAT(
      last_line(outcome.output),
      ::testing::AnyOf("smprun: first cause: rank 1: was ended by signal 11 (Segmentation "
                       "fault) and left no message",
                       "smprun: first cause: no rank left a message; mpirun ended with exit "
                       "status 139, as it does when a rank is ended by signal 11 "
                       "(Segmentation fault)"));
  EXPECT_LT(lines(outcome.output), 15) << outcome.output;
  EXPECT_FALSE(runs(0));
}

TEST_F(Smprun, SendsSignalsOnAndDoesNotStartAgain) {
  unsetenv(kFarewell);
  for (const auto& [signal, name] : {std::pair{SIGTERM, "Terminated"}, {SIGINT, "Interrupt"}}) {
    fs::remove(folder_ / "pid.0");
    fs::remove(folder_ / "pid.1");
    const std::string pid = folder_.string() + "/pid.";
    // A shell ignores interrupts in commands that it starts with &.
    const Outcome outcome = run("{ env --default-signal=INT " + command("wait", " --restarts 3") +
                                " & launcher=$!; until [ -s " + pid + "0 ] && [ -s " + pid +
                                "1 ]; do sleep 0.1; done; kill -" + std::to_string(signal) +
                                " $launcher; wait $launcher; }");
    EXPECT_EQ(outcome.status, 128 + signal) << outcome.output;
    EXPECT_EQ(last_line(outcome.output),
              "smprun: stopped by signal " + std::to_string(signal) + " (" + name + ")");
    EXPECT_FALSE(runs(0));
    EXPECT_FALSE(runs(1));
    EXPECT_FALSE(left_a_folder());
  }
}

/// One that came before a start keeps it from happening, and is no reason to leave anything.
TEST_F(Smprun, HearsSignalsThatCameBeforeAStart) {
  const Outcome outcome =
      run("python3 -c 'import os, signal, sys\n"
          "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
          "os.kill(os.getpid(), signal.SIGTERM)\n"
          "os.execvp(sys.argv[1], sys.argv[1:])' " +
          command("pass"));
  EXPECT_EQ(outcome.status, 128 + SIGTERM) << outcome.output;
  EXPECT_EQ(outcome.output, "smprun: stopped by signal 15 (Terminated)\n");
  EXPECT_FALSE(left_a_folder());
}

TEST_F(Smprun, HearsSignalsBetweenTwoStarts) {
  const std::string log = (folder_ / "log").string();
  const Outcome outcome = run("{ " + command("record", " --restarts 3") + " >" + log +
                              " 2>&1 & launcher=$!; until grep -q "
                              "'restart 1 of 3 in 2 s' " +
                              log +
                              "; do sleep 0.02; done; kill -TERM $launcher; wait "
                              "$launcher; status=$?; cat " +
                              log + "; exit $status; }");
  EXPECT_EQ(outcome.status, 128 + SIGTERM) << outcome.output;
  EXPECT_EQ(last_line(outcome.output), "smprun: stopped by signal 15 (Terminated)");
  EXPECT_FALSE(left_a_folder());
}

/// mpirun hangs where it cannot start ranks, and ranks may hang before they meet.
TEST_F(Smprun, RanksHaveToComeInTime) {
  const auto begin = [&](const std::string& name, int limit, const std::string& text) {
    const fs::path mpirun = folder_ / name / "mpirun";
    fs::create_directory(folder_ / name);
    // Written by another process: one that this process forks meanwhile would hold the file open,
    // and it could not be run.
    run("printf '%s' '#!/bin/sh\n" + text + "' >" + mpirun.string());
    fs::permissions(mpirun, fs::perms::owner_all);
    return std::async(std::launch::async, run,
                      "PATH=" + mpirun.parent_path().string() + ":$PATH " +
                          command("pass", " --start-timeout " + std::to_string(limit)));
  };
  const std::string arrive = ": >\"$SMP_FAILURE_DIR/arrived-";
  // Longer than a busy machine may stop before ranks have arrived.
  auto some = begin("some", 12, arrive + "0\"; exec sleep 60");
  auto all = begin("all", 12, arrive + "0\"; " + arrive + "1\"; exec sleep 13");
  const Outcome none = begin("none", 2, "exec sleep 60").get();
  EXPECT_EQ(none.status, 128 + SIGTERM);
  EXPECT_EQ(none.output,
            "smprun: first cause: ranks 0 and 1 have not come to smp::init within 2 s: mpirun "
            "could not start them, or they hang, or have much to do before. --start-timeout "
            "SECONDS allows more, 0 any time\n");
  const Outcome one = some.get();
  EXPECT_EQ(one.output.rfind("smprun: first cause: rank 1 has not come to smp::init", 0), 0u)
      << one.output;
  const Outcome both = all.get();
  EXPECT_EQ(both.status, 0) << both.output;
  EXPECT_FALSE(left_a_folder());
}

/// Jobs whose ranks are shell scripts.
class SmprunOfScripts : public Smprun {
 protected:
  /// Two ranks that note their processes and their folders and run `rank`; when both have begun,
  /// `then` runs, which knows $launcher, $mpirun and $folder. Ends as the launcher does.
  Outcome run_job(const std::string& options, const std::string& rank,
                  const std::string& then) const {
    std::ofstream(folder_ / "rank.sh") << R"sh(folder=$1 rank=$OMPI_COMM_WORLD_RANK
      echo $$ >"$folder/pid.$rank"
      echo "$SMP_FAILURE_DIR $SMP_RECOVERY_DIR" >"$folder/folders.$rank"
    )sh" << rank;
    for (const char* file : {"folders.0", "folders.1"}) fs::remove(folder_ / file);
    std::ofstream(folder_ / "job.sh") << before_ << "\nfolder=" << folder_.string() << "\n"
                                      << "env --default-signal=INT tools/smprun_bin --config "
                                      << config_.string() << " " << options
                                      << R"sh( sh "$folder/rank.sh" "$folder" &
      launcher=$!
      until [ -s "$folder/folders.0" ] && [ -s "$folder/folders.1" ]; do sleep 0.02; done
      mpirun=$(cat /proc/$launcher/task/$launcher/children)
    )sh" << then << "\nwait $launcher\n";
    return run("bash " + (folder_ / "job.sh").string());
  }

  /// No process and no folder.
  void expect_nothing_left() const {
    EXPECT_FALSE(runs(0));
    EXPECT_FALSE(runs(1));
    std::ifstream in(folder_ / "folders.0");
    std::string messages, memory;
    EXPECT_TRUE(in >> messages >> memory);
    EXPECT_FALSE(fs::exists(messages)) << messages;
    EXPECT_FALSE(fs::exists(memory)) << memory;
    EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
  }

  std::string before_;  // commands of the shell that starts the job
};

const char* const kUntilGo = "until [ -e \"$folder/go\" ]; do sleep 0.02; done; echo went";

/// A rank that writes until it is killed.
const char* const kStubborn = R"sh(
  trap '' TERM INT HUP
  while :; do echo x >"$SMP_RECOVERY_DIR/$rank.$((i = (i + 1) % 100))"; done
)sh";

/// The launcher ignores signals as under nohup. Signals that an interrupted shell ignores, mpirun
/// does not hear of either.
TEST_F(SmprunOfScripts, SignalsThatAreIgnoredStayAway) {
  before_ = "trap '' HUP";
  const Outcome outcome =
      run_job("", kUntilGo, "kill -HUP $launcher $mpirun; sleep 0.5; touch \"$folder/go\"");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_EQ(outcome.output, "went\nwent\n");
  expect_nothing_left();
}

/// The second has mpirun leave at once, while its ranks go on writing.
TEST_F(SmprunOfScripts, TwoInterruptsLeaveNothing) {
  unsetenv(kFarewell);
  const Outcome outcome =
      run_job("", kStubborn, "kill -INT $launcher; sleep 0.05; kill -INT $launcher");
  EXPECT_EQ(outcome.status, 128 + SIGINT) << outcome.output;
  EXPECT_EQ(last_line(outcome.output), "smprun: stopped by signal 2 (Interrupt)");
  expect_nothing_left();
}

TEST_F(SmprunOfScripts, AKilledMpirunLeavesNothing) {
  const Outcome outcome = run_job("", kStubborn, "kill -KILL $mpirun");
  EXPECT_EQ(outcome.status, 128 + SIGKILL) << outcome.output;
  EXPECT_EQ(last_line(outcome.output),
            "smprun: first cause: mpirun was ended by signal 9 (Killed)");
  expect_nothing_left();
}

/// SIGTERM to all, of which the ranks and mpirun take no notice, since it is the launcher that
/// asks.
TEST_F(SmprunOfScripts, AJobThatStopsByItself) {
  std::ofstream(config_) << R"({"partitions": 2, "preempt_seconds": 50})";
  const std::string stops = R"sh(
    trap '' TERM
    : >"$folder/deaf.$rank"
    until [ -e "$SMP_FAILURE_DIR/stop" ]; do sleep 0.02; done
    if [ $rank = 1 ]; then
      until [ -e "$SMP_FAILURE_DIR/written" ]; do sleep 0.02; done
      exit 75
    fi
    : >"$SMP_FAILURE_DIR/stopping"
    echo 7 >"$SMP_FAILURE_DIR/steps"
  )sh";
  const std::string ends = ": >\"$SMP_FAILURE_DIR/written\"; exit 75";
  const std::string to_all = R"sh(
    until [ -e "$folder/deaf.0" ] && [ -e "$folder/deaf.1" ]; do sleep 0.02; done
    kill -TERM $launcher $mpirun $(cat "$folder"/pid.?)
  )sh";
  const std::string saved = "echo '[\"run/a\", 7]' >\"$SMP_FAILURE_DIR/checkpoints\";";
  const Outcome outcome = run_job("--restarts 3", stops + saved + ends, to_all);
  EXPECT_EQ(outcome.status, 75) << outcome.output;
  EXPECT_EQ(outcome.output.rfind("smprun: asks the job to stop, within 50 s\n", 0), 0u)
      << outcome.output;
  EXPECT_EQ(last_line(outcome.output), "smprun: preempted: checkpoint run/a of step 7");
  expect_nothing_left();
  const Outcome without = run_job("", stops + ends, "kill -TERM $launcher");
  EXPECT_EQ(without.status, 75) << without.output;
  EXPECT_EQ(last_line(without.output), "smprun: preempted after step 7: no checkpoint was saved");
}

TEST_F(SmprunOfScripts, AJobThatDoesNotStopByItself) {
  std::ofstream(config_) << R"({"partitions": 2, "preempt_seconds": 1})";
  const Outcome outcome = run_job("--restarts 3", kStubborn, "kill -TERM $launcher");
  EXPECT_EQ(outcome.status, 128 + SIGTERM) << outcome.output;
  EXPECT_EQ(last_line(outcome.output),
            "smprun: stopped by signal 15 (Terminated): the job has not stopped by itself within "
            "\"preempt_seconds\"");
  expect_nothing_left();
}

TEST_F(Smprun, DryRunStartsNothing) {
  const Outcome outcome =
      run("tools/smprun_bin --dry-run --np 4 tests/core/failing_rank --config x");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output.find("mpirun -np 4 "), 0u) << outcome.output;
  const std::string end = " tests/core/failing_rank --config x\n";
  EXPECT_EQ(outcome.output.rfind(end), outcome.output.size() - end.size()) << outcome.output;
}

TEST_F(Smprun, UsageErrors) {
  const Outcome none = run("tools/smprun_bin --np 2");
  EXPECT_EQ(none.status, 2);
  EXPECT_EQ(none.output.find("smprun: expected a program to run, got none.\n"), 0u);
  EXPECT_EQ(run("tools/smprun_bin --unknown 2 p")
                .output.find("smprun: expected a program to run, got --unknown.\n"),
            0u);
  std::ofstream(config_) << R"({"microbatches": 2})";
  const Outcome bad = run(command("pass"));
  EXPECT_EQ(bad.status, 2);
  EXPECT_EQ(last_line(bad.output),
            "[smp] smprun: the number of ranks is unknown: the configuration has none of "
            "\"partitions\", \"tensor_parallel_degree\", \"sharded_data_parallel_degree\" and "
            "mpi.processes_per_host. Give --np N.");
}

TEST_F(Smprun, ChecksTheProgramAndTheRanksBeforeItStartsAnything) {
  EXPECT_EQ(run("tools/smprun_bin --np 2 ./missing").output,
            "[smp] smprun: the program ./missing does not exist. Give the path of an executable "
            "file.\n");
  EXPECT_EQ(run("tools/smprun_bin --np 2 " + config_.string()).output,
            "[smp] smprun: the program " + config_.string() +
                " cannot be executed. Give the path of an executable file.\n");
  const Outcome unknown = run("tools/smprun_bin --np 2 no_such_program");
  EXPECT_EQ(unknown.status, 2);
  EXPECT_EQ(unknown.output,
            "[smp] smprun: the program no_such_program is not in PATH. Give its path, "
            "./no_such_program for one in this folder.\n");
  const Outcome none = run("tools/smprun_bin --np 0 /bin/true");
  EXPECT_NE(none.status, 0);
  EXPECT_NE(none.output.find("--np: Value 0 not in range"), std::string::npos) << none.output;
  EXPECT_LT(none.output.size(), 200) << none.output;
}

TEST_F(Smprun, SaysWhatToInstallWithoutMpirun) {
  const Outcome outcome = run("PATH=/nonexistent tools/smprun_bin --np 2 /bin/true");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.output,
            "[smp] mpirun: not found in PATH. Install Open MPI (on Debian and Ubuntu: the package "
            "openmpi-bin).\n");
}

TEST_F(Smprun, SaysWhatCannotBeStarted) {
  fs::create_directory(folder_ / "bin");
  std::ofstream(folder_ / "bin/mpirun") << "not executable";
  const Outcome outcome =
      run("PATH=" + (folder_ / "bin").string() + " tools/smprun_bin --np 2 /bin/true");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.output,
            "[smp] mpirun: cannot be started: Permission denied. Check what is called so in PATH; "
            "smprun --dry-run prints the command.\n");
}

TEST_F(Smprun, SaysWhereItNeedsAFolder) {
  const std::string missing = (folder_ / "missing").string();
  const Outcome outcome = run("TMPDIR=" + missing + " " + command("pass"));
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.output.find("[smp] smprun: cannot create the folder " + missing + "/smprun-"),
            0u)
      << outcome.output;
  EXPECT_NE(outcome.output.find(": No such file or directory. Set TMPDIR to a folder that can be "
                                "written."),
            std::string::npos)
      << outcome.output;
}

// The script that users call finds the launcher from its own place, also through a link.
TEST_F(Smprun, ScriptFindsTheLauncher) {
  const fs::path root = folder_ / "repository";
  fs::create_directories(root / "tools");
  fs::copy_file("tools/smprun", root / "tools/smprun");
  fs::create_symlink(root / "tools/smprun", folder_ / "link");
  const std::string script = (folder_ / "link").string() + " --dry-run --np 3 p";

  fs::create_directory(folder_ / "bin");
  for (const char* tool : {"bash", "env", "dirname", "readlink"}) {
    fs::create_symlink(fs::path("/usr/bin") / tool, folder_ / "bin" / tool);
  }
  const Outcome missing = run("PATH=" + (folder_ / "bin").string() + " " + script);
  EXPECT_EQ(missing.status, 2);
  EXPECT_EQ(
      missing.output,
      "smprun: " + (root / "bazel-bin/tools/smprun_bin").string() +
          " does not exist and bazel is not in PATH. Run tools/quickstart, which builds it.\n");

  fs::create_directories(root / "bazel-bin/tools");
  fs::create_symlink(fs::absolute("tools/smprun_bin"), root / "bazel-bin/tools/smprun_bin");
  const Outcome found = run(script);
  EXPECT_EQ(found.status, 0);
  EXPECT_EQ(found.output.find("mpirun -np 3 "), 0u) << found.output;
}

}  // namespace
}  // namespace smp::tools
