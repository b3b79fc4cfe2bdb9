/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the start of each test cheaper: Criterion runs each in a process of its own, which starts libgit2, and that
 * parses the certificates of all authorities that this machine trusts. It takes half of the CPU time of a short test,
 * and more under a sanitizer. Criterion needs libgit2 only to show how two texts differ, for assertions of
 * <criterion/new/assert.h>, which no test here uses. These functions replace the three of libgit2 that it calls. */
int git_libgit2_init(void);
int git_libgit2_shutdown(void);
int git_diff_buffers(void);

int git_libgit2_init(void)
{
    return 1; /* how often it was called */
}

int git_libgit2_shutdown(void)
{
    return 0;
}

int git_diff_buffers(void)
{
    return -1;
}
