/* SPDX-License-Identifier: Apache-2.0 */
/* A page of host memory that all ranks of a node share. In it a rank announces that it will no longer touch the memory
 * of the others. Reading and writing it needs no other rank, so it also works when a rank is lost. */
#ifndef PERSEUS_FUSED_BOARD_H
#define PERSEUS_FUSED_BOARD_H

#include <stdbool.h>
#include <stdint.h>

#include "fused/core/place.h"

struct prs_board;

/* Every rank of a node calls it with the same name, which no other board of the node has. 0, -EXDEV or -ENOMEM. */
int prs_board_open(uint64_t name, const struct prs_place *at, struct prs_board **out);
/* Removes the board's name. One rank calls it, once all ranks of the node have opened the board or failed to. */
void prs_board_hide(const struct prs_board *b);
/* NULL does nothing. */
void prs_board_close(struct prs_board *b);

/* Waits until every rank of the node has called it, for timeout_ms at most: then all ranks get 0, or all -ETIMEDOUT,
 * also those that come too late. *missing: the number in the node of a rank that had not come when another gave up, or
 * whose process has ended. Calls of a rank are paired with those of the others in their order. */
int prs_board_gather(struct prs_board *b, uint32_t timeout_ms, uint32_t *missing);

/* This rank has unmapped the memory of all others, and none of its kernels runs. */
void prs_board_leave(struct prs_board *b);
/* Whether the rank with this number in the node has left, or its process has ended. */
bool prs_board_has_left(const struct prs_board *b, uint32_t rank);
/* The same for all other ranks. */
bool prs_board_all_left(const struct prs_board *b);

#endif
