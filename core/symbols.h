// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp::core {

/// The functions of a process at these addresses: "load_batch", or "gpt+0x1a2b3", the file and the
/// address in it, where its symbols do not say. Reads /proc and the program's files. `addresses`
/// are a stack's: the first is that of an instruction, the others return to the one after a call,
/// and 0 stands for omitted ones, "...".
std::vector<std::string> function_names(pid_t process, const std::vector<uint64_t>& addresses);

/// Functions of a stack without plumbing: not the callers of `main` or of a thread's function, and
/// only the innermost of the standard library's that call each other.
std::vector<std::string> without_plumbing(const std::vector<std::string>& names);

/// A demangled name without template arguments, parameters and a function's result type:
/// "std::vector::at".
std::string short_name(const std::string& demangled);

}  // namespace smp::core
