/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/common/option_table.h"

struct options {
    uint32_t ranks;
    bool json;
    uint64_t chunk;
    const char *label;
    uint32_t op, shapes;
    struct option_list sizes, policies, groups;
};

static bool parse_shape(void *options, const char *text)
{
    uint32_t rows, columns;

    ((struct options *)options)->shapes++;
    return sscanf(text, "%ux%u", &rows, &columns) == 2;
}

#define FIELD(member) OPTION_FIELD(struct options, member)

static const char *const ops[] = {"put", "get", NULL};
static const char *const policies[] = {"drain", "counted", NULL};
static const char *const groups[] = {"coupled", "peer", NULL};
static const struct option_row rows[] = {
    {OPTION_NUMBER, "ranks", "N", "processes", FIELD(ranks), 1, 64},
    {OPTION_SET, "json", NULL, "one object a line", FIELD(json), 1},
    {OPTION_NUMBER, "chunk", "BYTES", "largest message", FIELD(chunk), 1, 1 << 30},
    {OPTION_TEXT, "label", "TEXT", "for the rows", FIELD(label)},
    {OPTION_CHOICE, "op", "NAME", "operation", FIELD(op), 0, 0, ops},
    {OPTION_NUMBERS, "sizes", "LIST", "bytes", FIELD(sizes), 0, 1ull << 40, NULL, 4},
    {OPTION_CHOICES, "policy", "LIST", "policies", FIELD(policies), 0, 0, policies},
    {OPTION_NUMBERS, "group", "LIST", "groups", FIELD(groups), 1, 99, groups},
    {OPTION_PARSED, "shape", "MxN", "rows and columns", OPTION_PARSED_BY(parse_shape)},
};
static const struct option_table table = {"tool", "usage: tool [options]\n", NULL, rows,
                                          sizeof(rows) / sizeof(rows[0])};

enum { WORDS = 8 };

static int parse(struct options *options, const char *const *words, char **argv)
{
    int argc = 1;

    memset(options, 0, sizeof(*options));
    argv[0] = (char *)(uintptr_t) "tool";
    for (; words[argc - 1]; argc++)
        argv[argc] = (char *)(uintptr_t)words[argc - 1];
    argv[argc] = NULL;
    return option_table_parse(&table, options, argc, argv);
}

/* What a process with these words prints, and its exit status. */
static int status_of(const char *const *words, char *said, size_t bytes)
{
    int pipes[2], status;
    ssize_t length;

    cr_assert_eq(pipe(pipes), 0);
    fflush(NULL);
    if (fork() == 0) {
        struct options options;
        char *argv[WORDS + 2];

        dup2(pipes[1], STDOUT_FILENO);
        dup2(pipes[1], STDERR_FILENO);
        parse(&options, words, argv);
        _exit(0);
    }
    close(pipes[1]);
    wait(&status);
    length = read(pipes[0], said, bytes - 1);
    said[length > 0 ? length : 0] = '\0';
    close(pipes[0]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Test(option_table, each_kind_of_value_reaches_its_field)
{
    struct options o;
    char *argv[WORDS + 2];
    int first = parse(
        &o, (const char * [WORDS + 1]){"--ranks", "8", "file", "--json", "--chunk=64K", "--label", "x", "--op=get"},
        argv);

    cr_assert(o.ranks == 8 && o.json && o.chunk == 65536 && !strcmp(o.label, "x") && o.op == 1);
    cr_assert_eq(first, 8);
    cr_assert_str_eq(argv[first], "file");
    parse(&o, (const char * [WORDS + 1]){"--shape", "1x2", "--shape", "3x4"}, argv);
    cr_assert(o.shapes == 2 && !o.ranks && !o.json);
}

Test(option_table, a_list_holds_numbers_ranges_and_names_in_their_order)
{
    static const struct {
        const char *text;
        uint32_t count;
        uint64_t value[8];
    } lists[] = {
        {"7", 1, {7}},
        {"1,2K,3M", 3, {1, 2048, 3 << 20}},
        {"8:32:x2", 3, {8, 16, 32}},
        {"8:31:x2,5", 3, {8, 16, 5}},
        {"8:128", 3, {8, 32, 128}}, /* by the row's factor */
        {"0:4:x2", 4, {0, 1, 2, 4}},
        {"1:7:+3", 3, {1, 4, 7}},
        {"5:5", 1, {5}},
        {"256G:1024G:+512G", 2, {1ull << 38, 3ull << 38}},
    };
    struct options o;

    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        option_table_set(&table, &o, "sizes", lists[i].text);
        cr_assert_eq(o.sizes.count, lists[i].count, "%s: %u", lists[i].text, o.sizes.count);
        cr_assert_arr_eq(o.sizes.value, lists[i].value, lists[i].count * sizeof(uint64_t), "%s", lists[i].text);
    }
    option_table_set(&table, &o, "policy", "counted,drain");
    cr_assert(o.policies.count == 2 && o.policies.value[0] == 1 && o.policies.value[1] == 0);
    option_table_set(&table, &o, "group", "peer,4,coupled");
    cr_assert(o.groups.count == 3 && o.groups.value[0] == 101 && o.groups.value[1] == 4 && o.groups.value[2] == 100);
}

Test(option_table, a_wrong_option_is_refused_by_name_value_and_what_is_allowed)
{
    static const struct {
        const char *words[3];
        const char *names[3];
    } wrong[] = {
        {{"--ranks", "65"}, {"tool: --ranks", "'65'", "1 to 64"}},
        {{"--ranks", "0"}, {"--ranks", "'0'", "1 to 64"}},
        {{"--ranks", "-1"}, {"--ranks", "'-1'", "1 to 64"}},
        {{"--ranks", " 8"}, {"--ranks", "' 8'", "1 to 64"}},
        {{"--ranks", ""}, {"--ranks", "''", "1 to 64"}},
        {{"--ranks", "8x"}, {"--ranks", "'8x'", "1 to 64"}},
        {{"--chunk", "18446744073709551615"}, {"--chunk", "'18446744073709551615'", "1073741824"}},
        {{"--chunk", "99999999999999999999"}, {"--chunk", "'99999999999999999999'", "1073741824"}},
        {{"--chunk", "17179869185G"}, {"--chunk", "'17179869185G'", "1073741824"}},
        {{"--op", "fly"}, {"--op", "'fly'", "put, get"}},
        {{"--sizes", "1,"}, {"--sizes", "'1,'", "FROM:TO"}},
        {{"--sizes", ""}, {"--sizes", "''", "FROM:TO"}},
        {{"--sizes", "5:1"}, {"--sizes", "'5:1'", "FROM:TO"}},
        {{"--sizes", "1:2:3"}, {"--sizes", "'1:2:3'", "FROM:TO"}},
        {{"--sizes", "1:9:x1"}, {"--sizes", "'1:9:x1'", "FROM:TO"}},
        {{"--sizes", "1:9:+0"}, {"--sizes", "'1:9:+0'", "FROM:TO"}},
        {{"--sizes", "1:9:x16G"}, {"--sizes", "'1:9:x16G'", "FROM:TO"}},
        {{"--sizes", "0:512:+1"}, {"--sizes", "'0:512:+1'", "at most 512"}},
        {{"--group", "8:16"}, {"--group", "'8:16'", "coupled, peer"}}, /* its ranges need a factor */
        {{"--policy", "drain,fly"}, {"--policy", "'drain,fly'", "drain, counted"}},
        {{"--policy", "1"}, {"--policy", "'1'", "drain, counted"}},
        {{"--shape", "1y2"}, {"--shape", "'1y2'", "MxN: rows and columns"}},
        {{"--what"}, {"'--what'", "not an option", "--help"}},
        {{"--ranks"}, {"--ranks", "needs a value", "--help"}},
    };

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char said[1024];

        cr_assert_eq(status_of(wrong[i].words, said, sizeof(said)), 2, "row %zu", i);
        for (int k = 0; k < 3; k++)
            cr_assert(strstr(said, wrong[i].names[k]), "row %zu: no %s in: %s", i, wrong[i].names[k], said);
    }
}

Test(option_table, help_names_every_option_and_version_the_version)
{
    char said[4096];

    cr_assert_eq(status_of((const char *[]){"--version", NULL}, said, sizeof(said)), 0);
    cr_assert(strstr(said, "tool " PRS_VERSION "\n"), "%s", said); /* LeakSanitizer may say a line before it */
    cr_assert_eq(status_of((const char *[]){"--help", NULL}, said, sizeof(said)), 0);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        cr_assert(strstr(said, rows[i].name) && strstr(said, rows[i].help), "%s: %s", rows[i].name, said);
}
