// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <regex>
#include <string>

#include "core/check.h"
#include "core/schema.h"
#include "tools/config_texts.h"

namespace smp::tools {
namespace {

using core::Parameter;

constexpr const char* kIntroduction =
    R"(# Configuration

<!-- Generated from core/schema_table.cc: bazel run //tools:config_files -->

## Where parameters come from

Strongest first, key by key:

1. the environment variable `SM_HP_MP_PARAMETERS`: a JSON object of parameters. The launcher sets it;
2. a file: `smp::Config::from_file("smp.json")`;
3. the program: `smp::Config().partitions(2).microbatches(4)`.

A file holds the parameters themselves,

```json
{"partitions": 2, "microbatches": 4}
```

or the `distribution` argument of the SageMaker estimator as JSON:

```json
{
  "smdistributed": {
    "modelparallel": {"enabled": true, "parameters": {"partitions": 2, "microbatches": 4}}
  },
  "mpi": {"enabled": true, "processes_per_host": 2, "custom_mpi_options": "--report-bindings"}
}
```

where `parameters` may also be the path of a file, relative to this one.

`smp::init` merges the sources, checks everything, and reports all mistakes at once:

```
[smp] the configuration has 2 errors:
  smp.json: "micro_batches": unknown parameter. Did you mean "microbatches"?
  smp.json: "memory_weight": memory_weight must be between 0.0 and 1.0! (got 1.5)
```

A parameter whose feature does not exist in this version is refused, never ignored. Printing a
`smp::Config` shows each parameter in effect, where it comes from, and what it overrides.

)";

constexpr const char* kEnding =
    R"(`smprun`, which starts ranks with a configuration, and environment variables:
[Launching](launching.md).
)";

std::string type_text(const Parameter& parameter) {
  if (!parameter.values.empty()) {
    std::string text;
    for (const std::string& value : parameter.values) {
      text += (text.empty() ? "`" : ", `") + value + "`";
    }
    if (parameter.or_integer) text += " or a positive integer";
    return text;
  }
  return core::expected_values(parameter);
}

std::string default_text(const Parameter& parameter) {
  if (!parameter.default_text.empty()) return parameter.default_text;
  return "`" + core::to_string(parameter.default_value) + "`";
}

/// `text` with the pages that it names as links: docs/data_parallel.md is called "data parallel".
std::string linked(const std::string& text) {
  static const std::regex page("docs/(\\w+)\\.md");
  std::string result;
  auto rest = text.cbegin();
  for (std::sregex_iterator match(text.begin(), text.end(), page), end; match != end; ++match) {
    std::string words = (*match)[1];
    const std::string file = words + ".md";
    std::replace(words.begin(), words.end(), '_', ' ');
    result.append(rest, (*match)[0].first).append("[" + words + "](" + file + ")");
    rest = (*match)[0].second;
  }
  return result.append(rest, text.cend());
}

/// Without its full stop.
std::string first_sentence(const std::string& text) {
  return text.substr(0, (text + " ").find(". "));
}

/// The parameters with which most programs get along, each with its subject.
std::string table_of_the_first() {
  constexpr std::array kFirst{"partitions", "microbatches", "ddp", "tensor_parallel_degree",
                              "optimize",   "pipeline"};
  std::string text = "## The six that matter first\n\n| parameter | default | |\n|---|---|---|\n";
  for (const char* name : kFirst) {
    const Parameter* parameter = core::find_parameter(name);
    SMP_INTERNAL_ASSERT(parameter != nullptr, name);
    text += "| [`" + parameter->name + "`](#" + parameter->name + ") | " +
            default_text(*parameter) + " | " + linked(first_sentence(parameter->doc)) + " |\n";
  }
  return text + "\n";
}

std::string entry(const Parameter& parameter) {
  std::string text = "### `" + parameter.name + "`\n\n" + linked(parameter.doc) + "\n\n";
  if (!parameter.alias.empty()) text += "- Also called: `" + parameter.alias + "`\n";
  text += "- Value: " + type_text(parameter) + "\n- Default: " + default_text(parameter) + "\n";
  if (!parameter.needs.empty()) text += "- Needs: `" + parameter.needs + "`\n";
  return text + "\n";
}

std::string tensorflow_table() {
  std::string text =
      "Part of SMP's parameters for TensorFlow; accepted with their default only.\n\n"
      "| parameter | value | the value accepted | meaning |\n|---|---|---|---|\n";
  for (const Parameter& parameter : core::schema()) {
    if (!parameter.tensorflow_only) continue;
    text += "| `" + parameter.name + "` | " + type_text(parameter) + " | " +
            default_text(parameter) + " | " + parameter.doc + " |\n";
  }
  return text + "\n";
}

}  // namespace

std::string configuration_page() {
  std::string text = kIntroduction + table_of_the_first();
  std::string group;
  for (const Parameter& parameter : core::schema()) {
    const bool begins = parameter.group != group;
    group = parameter.group;
    if (begins) text += "## " + group + "\n\n";
    if (!parameter.tensorflow_only) {
      text += entry(parameter);
    } else if (begins) {
      text += tensorflow_table();
    }
  }
  return text + kEnding;
}

}  // namespace smp::tools
