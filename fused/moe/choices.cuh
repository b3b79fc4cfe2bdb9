/* SPDX-License-Identifier: Apache-2.0 */
/* The router's choices, and what the status reports about them. */
#ifndef PERSEUS_FUSED_CHOICES_CUH
#define PERSEUS_FUSED_CHOICES_CUH

#include "fused/core/ptx.cuh"
#include "fused/moe/args.h"

/* The tokens of this rank in this launch. */
PRS_DEVICE uint32_t token_count(const struct prs_moe_args &args)
{
    uint32_t count = args.count_on_device ? *args.count_on_device : args.count;
    return count < args.route.tokens ? count : args.route.tokens;
}

/* For the status. */
PRS_DEVICE void count_without_place(const struct prs_moe_args &args, int32_t place, uint32_t token)
{
    if (place == PRS_ROUTE_NO_CHOICE)
        return;
    if (place == PRS_ROUTE_ABSENT) {
        atomicAdd(&args.claims->absent, 1u);
        return;
    }
    atomicAdd(place == PRS_ROUTE_WRONG_PLACE ? &args.claims->wrong_places : &args.claims->wrong, 1u);
    atomicMax(&args.claims->wrong_token, ~token);
}

PRS_DEVICE void write_send_status(const struct prs_moe_args &args)
{
    uint32_t count = args.count_on_device ? *args.count_on_device : args.count;
    args.status->wrong_choices = *(volatile uint32_t *)&args.claims->wrong;
    args.status->wrong_token = ~*(volatile uint32_t *)&args.claims->wrong_token;
    args.status->tokens_dropped = count - token_count(args);
    args.status->absent_choices = *(volatile uint32_t *)&args.claims->absent;
    args.status->wrong_places = *(volatile uint32_t *)&args.claims->wrong_places;
}

#endif
