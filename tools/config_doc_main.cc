// Prints docs/configuration.md: bazel run //tools:config_doc > docs/configuration.md

#include <iostream>

#include "tools/config_doc.h"

int main() { std::cout << smp::tools::configuration_page(); }
