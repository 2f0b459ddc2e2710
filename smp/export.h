// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Before what users of the shared library call or derive from. The library is compiled with
/// -fvisibility=hidden, so nothing else of it is exported. Templates and what is defined in a
/// header need none.
#define SMP_API [[gnu::visibility("default")]]
