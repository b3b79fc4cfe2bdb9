/* SPDX-License-Identifier: Apache-2.0 */
/* The machine that the plans predict times for: H200 GPUs, NVLink, ports of 400 Gb/s. Measured on 2 and 4 x H200
 * (doc/fused-notes.md) unless a line says otherwise. Where figures for the same quantity differ, each is the one that
 * the named kernel reached, or that its model was fitted to. The tuning tests fix the choices that follow from them.
 * Plain C, no CUDA. */
#ifndef PERSEUS_FUSED_MACHINE_H
#define PERSEUS_FUSED_MACHINE_H

static const double PRS_SMS = 132;

/* Bytes per microsecond over NVLink, one direction. */
static const double PRS_STORE_BYTES_PER_US = 357e3;       /* stored by SMs */
static const double PRS_ROW_STORE_BYTES_PER_US = 355e3;   /* stored by SMs, row by row */
static const double PRS_COPY_BYTES_PER_US = 357e3;        /* copy engines, large pieces */
static const double PRS_BESIDE_COPY_BYTES_PER_US = 350e3; /* copy engines, one copy while a kernel runs */

/* Bytes per microsecond through one 400 Gb/s port. */
static const double PRS_PORT_BYTES_PER_US = 45e3;     /* the link's rate without headers; not measured */
static const double PRS_ROW_PORT_BYTES_PER_US = 47e3; /* puts of many rows */

static const double PRS_MEMORY_BYTES_PER_US = 4.3e6;
static const double PRS_CLOCKS_PER_US = 1600; /* clock of an SM under full load; without load it is 1980 */
/* fixed time of a fused kernel: launch, first stages, last tile's store */
static const double PRS_START_US = 8;

/* Microseconds for `flops` operations on `sms` SMs. flops_per_us: a family's rate on all SMs. */
static inline double prs_compute_us(double flops, double flops_per_us, double sms)
{
    return flops / (flops_per_us / PRS_SMS * sms);
}

#endif
