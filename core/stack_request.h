// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/status_report.h"

namespace smp::core {

/// From now on the ranks of this process answer when others ask for their stacks, by SIGURG: what
/// does nothing where nobody handles it. False where the program handles that signal itself.
bool answer_stack_requests();

/// Whether that still holds: the program may have installed a handler of its own since, which a
/// request must not call.
bool still_answers_stack_requests();

/// Asks those ranks of this host on which others wait, and which are neither stopped nor blocked
/// in the kernel, where they are, and notes it in their `stack`. One answers within a fifth of a
/// second or not at all. What a signal interrupts for others, as `nanosleep`, it
/// interrupts here: docs/status.md.
void ask_for_stacks(JobStatus& job);

}  // namespace smp::core
