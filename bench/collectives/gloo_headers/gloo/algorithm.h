// SPDX-License-Identifier: Apache-2.0
// libtorch ships gloo's code but not its headers. The declaration of c10d::ProcessGroupGloo needs
// these; nothing in them could be used.
#pragma once
