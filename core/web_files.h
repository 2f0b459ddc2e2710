// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::core {

/// A file of core/web, as text.
struct WebFile {
  const char* name;
  const char* text;
};

/// All of them; the last has no name. Written by core/web/embed.sh.
extern const WebFile kWebFiles[];

}  // namespace smp::core
