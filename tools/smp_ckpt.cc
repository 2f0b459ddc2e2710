// SPDX-License-Identifier: Apache-2.0
// smp_ckpt: looks at checkpoints, and makes others of them. docs/checkpoints.md

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "core/check.h"
#include "core/text.h"
#include "tools/checkpoint_commands.h"
#include "tools/checkpoint_source.h"
#include "tools/checkpoint_text.h"
#include "tools/program.h"

namespace smp::tools {
namespace {

using checkpoint::Reader;
using core::printable;

constexpr const char* kInput =
    "A checkpoint, a .safetensors file, or a state dictionary of torch.save";
constexpr int kFoundStatus = 1;

struct Options {
  std::string input;
  std::string second;  ///< output, or the file to compare with
  std::string dtype;
  std::string format = "text";
  bool tensors = false;
  Conversion conversion;
  size_t lines = 20;
};

int list(const Options& options) {
  std::cout << list_checkpoints(options.input);
  return 0;
}

/// In ASCII; names in a state dictionary may be no UTF-8.
std::string to_json(const nlohmann::ordered_json& description) {
  return description.dump(2, ' ', /*ensure_ascii=*/true,
                          nlohmann::ordered_json::error_handler_t::replace);
}

int inspect(const Options& options) {
  CheckpointSource source(options.input);
  const auto description = describe(source, options.tensors);
  std::cout << (options.format == "json" ? to_json(description) + "\n" : to_text(description));
  return 0;
}

int verify(const Options& options) {
  try {
    Reader reader(options.input);
    checkpoint::check_undamaged(options.input, reader.find_damage(Reader::Section::kAll));
    const auto& index = reader.index();
    std::cout << printable(options.input) << ": "
              << index.model.size() + index.optimizer_tensors.size() << " tensors in "
              << index.files.size() << " files are as they were written\n";
    return 0;
  } catch (const CheckpointError& error) {
    std::cerr << error.what() << "\n";
    return kFoundStatus;
  }
}

/// One line for each tensor, which does not depend on who wrote it into which file.
int hashes(const Options& options) {
  const Reader reader(options.input);
  const auto print = [](const char* section, const auto& tensors) {
    for (const auto& [name, entry] : tensors) {
      std::printf("%s/%s %016" PRIx64 "\n", section,
                  printable(name, checkpoint::kLongestName).c_str(), entry.hash);
    }
  };
  print("model", reader.index().model);
  print("optimizer", reader.index().optimizer_tensors);
  return 0;
}

int convert(Options options) {
  if (!options.dtype.empty()) {
    options.conversion.dtype = checkpoint::dtype_from_name(options.dtype);
  }
  CheckpointSource source(options.input);
  convert(source, options.second, options.conversion);
  std::cout << printable(options.second) << " written\n";
  return 0;
}

int merge(const Options& options) {
  SMP_CHECK_WITH(UsageError, is_one_file(options.second),
                 "smp_ckpt merge: expected an output that ends with .safetensors or .pt, got \"",
                 printable(options.second), "\".");
  return convert(options);
}

int diff(const Options& options) {
  CheckpointSource a(options.input), b(options.second);
  const auto lines = differences(a, b);
  for (size_t i = 0; i < std::min(lines.size(), options.lines); ++i) std::cout << lines[i] << "\n";
  if (lines.size() > options.lines) {
    std::cout << "and " << lines.size() - options.lines << " more differences\n";
  }
  if (lines.empty()) std::cout << "no difference\n";
  return lines.empty() ? 0 : kFoundStatus;
}

CLI::App* command(CLI::App& app, const char* name, const char* help, const char* input,
                  Options& options) {
  CLI::App* command = app.add_subcommand(name, help);
  command->add_option("input", options.input, input)->required();
  return command;
}

/// A command that writes.
CLI::App* writing(CLI::App& app, const char* name, const char* help, const char* output,
                  Options& options) {
  CLI::App* writing = command(app, name, help, kInput, options);
  writing->add_option("output", options.second, output)->required();
  return writing;
}

}  // namespace
}  // namespace smp::tools

int main(int argc, char** argv) {
  using namespace smp::tools;  // NOLINT(google-build-using-namespace)
  Options options;
  CLI::App app{
      "Looks at checkpoints and makes others of them; docs/checkpoints.md.\n"
      "Exit status: 0; 1 if verify or diff found something; 2 for errors.",
      "smp_ckpt"};
  add_version(app);
  app.require_subcommand(1);
  const auto* lists =
      command(app, "list", "The checkpoints of a folder, the oldest first", "The folder", options);
  auto* inspects = command(app, "inspect", "What a checkpoint holds", kInput, options);
  inspects->add_flag("--tensors", options.tensors, "Each tensor, too");
  inspects->add_option("--format", options.format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  const auto* verifies = command(
      app, "verify", "Compare all bytes with the hashes that were stored", "A checkpoint", options);
  const auto* hashed =
      command(app, "hashes", "The hash of each tensor, as it was stored", "A checkpoint", options);
  const auto* merges = writing(app, "merge", "The model as one file",
                               "FILE.safetensors, or FILE.pt for torch.load", options);
  auto* reshards =
      writing(app, "reshard", "The same checkpoint in other files", "A checkpoint", options);
  reshards->add_option("--shards", options.conversion.shards, "Files of model and of optimizer")
      ->check(CLI::PositiveNumber)
      ->required();
  auto* converts = writing(app, "convert", "Another type or format",
                           "FILE.safetensors, FILE.pt for torch.load, or a checkpoint", options);
  converts->add_option("--dtype", options.dtype, "F32, F16 or BF16 for all that is floating point")
      ->check(CLI::IsMember({"F64", "F32", "F16", "BF16"}));
  converts->add_option("--shards", options.conversion.shards, "Files of a checkpoint")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  converts->add_flag("--model-only", options.conversion.model_only, "Leave the optimizer out");
  auto* diffs = command(app, "diff", "How two differ", kInput, options);
  diffs->add_option("second", options.second, "Another")->required();
  diffs->add_option("--lines", options.lines, "How many differences are shown")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return status_of([&] {
    if (lists->parsed()) return list(options);
    if (inspects->parsed()) return inspect(options);
    if (verifies->parsed()) return verify(options);
    if (hashed->parsed()) return hashes(options);
    if (merges->parsed()) return merge(options);
    if (reshards->parsed() || converts->parsed()) return convert(options);
    return diff(options);
  });
}
