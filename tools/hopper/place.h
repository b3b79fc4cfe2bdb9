/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_HOPPER_PLACE_H
#define TOOLS_HOPPER_PLACE_H

#include "tools/hopper/instructions.h"

namespace hopper
{

/* The part of an instruction's order that remains. */
struct place_effect {
    bool removed;
    enum scope widest = SCOPE_SYS;
};
/* The effect on the instruction whose place was told last. */
struct place_effect place_taken(void);

} // namespace hopper

#endif
