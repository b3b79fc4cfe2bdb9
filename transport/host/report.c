/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions for log and errors, over transport/util. */
#include <assert.h>
#include <stddef.h>

#include "transport/util/error.h"
#include "transport/util/log.h"
#include <perseus/perseus.h>

static_assert(PRS_LOG_ERROR == (int)PRS_LEVEL_ERROR && PRS_LOG_DEBUG == (int)PRS_LEVEL_DEBUG,
              "the public levels are those of util/log.h");

static prs_log_fn *caller_fn; /* prs_log_sink(), called after the store, publishes it by its lock */

static void forward(void *user, int level, const char *file, int line, const char *text)
{
    prs_log_fn *fn = __atomic_load_n(&caller_fn, __ATOMIC_RELAXED);

    if (fn)
        fn(user, (enum prs_log_level)level, file, line, text);
}

void prs_log_set(prs_log_fn *fn, void *user)
{
    __atomic_store_n(&caller_fn, fn, __ATOMIC_RELAXED);
    prs_log_sink(fn ? forward : NULL, user);
}

const char *prs_error_text(void)
{
    return prs_error_last();
}

const char *prs_version(void)
{
    return PRS_VERSION;
}
