// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/status_report.h"

namespace smp::core {

/// Makes the ranks of this process answer requests for their stacks. Requests are SIGURG, which
/// does nothing where no handler is set. False where the program handles that signal itself.
bool answer_stack_requests();

/// Whether that still holds: the program may have installed a handler of its own since, which a
/// request must not call.
bool still_answers_stack_requests();

/// Asks those ranks of this host on which others wait, and which are neither stopped nor blocked in
/// the kernel, where they are, and notes it in their `stack`. One answers within a fifth of a
/// second or not at all. A signal interrupts the same calls as others do, such as `nanosleep`:
/// docs/recovery.md.
void ask_for_stacks(JobStatus& job);

}  // namespace smp::core
