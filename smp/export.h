// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks declarations that users of the shared library call or derive from. The library is compiled
/// with -fvisibility=hidden, so nothing else of it is exported. Templates and definitions in
/// headers need none.
#define SMP_API [[gnu::visibility("default")]]
