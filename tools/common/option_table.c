/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/option_table.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/stdout_check.h"

enum { FACTOR_MAX = 1 << 20, ROWS_MAX = 128 };

static void print_help(const struct option_table *table)
{
    fputs(table->head, stdout);
    for (uint32_t i = 0; i < table->count; i++) {
        const struct option_row *row = &table->rows[i];
        char name[64];

        snprintf(name, sizeof(name), "%s %s", row->name, row->value_name ? row->value_name : "");
        printf("  --%-22s %s\n", name, row->help);
    }
    printf("  --%-22s %s\n  --%-22s %s\n", "help", "print this", "version", "print the version");
    fputs(table->tail ? table->tail : "", stdout);
}

void option_table_refuse(const struct option_table *table, const char *format, ...)
{
    va_list args;

    fprintf(stderr, "%s: ", table->program);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (%s --help lists the options)\n", table->program);
    exit(2);
}

static void refuse_value(const struct option_table *table, const struct option_row *row, const char *text)
{
    char allowed[512] = "";
    size_t used = 0;

    for (int i = 0; row->names && row->names[i] && used < sizeof(allowed); i++)
        used += (size_t)snprintf(allowed + used, sizeof(allowed) - used, "%s%s", i ? ", " : "", row->names[i]);
    if (row->kind == OPTION_PARSED)
        option_table_refuse(table, "--%s '%s': want %s: %s", row->name, text, row->value_name, row->help);
    if (row->kind == OPTION_CHOICE || row->kind == OPTION_CHOICES)
        option_table_refuse(table, "--%s '%s': want %s%s", row->name, text,
                            row->kind == OPTION_CHOICES ? "a list of " : "one of ", allowed);
    if (row->kind == OPTION_NUMBER)
        option_table_refuse(table, "--%s '%s': want a number from %llu to %llu", row->name, text,
                            (unsigned long long)row->min, (unsigned long long)row->max);
    option_table_refuse(table,
                        "--%s '%s': want at most %d numbers from %llu to %llu, as a,b,c, FROM:TO:xFACTOR or "
                        "FROM:TO:+STEP%s%s",
                        row->name, text, OPTION_LIST_MAX, (unsigned long long)row->min, (unsigned long long)row->max,
                        allowed[0] ? ", or of " : "", allowed);
}

bool option_number(const char **text, uint64_t *value)
{
    static const char suffixes[] = "KMGkmg";
    const char *suffix;
    char *end;
    int shift;

    if (**text < '0' || **text > '9') /* strtoull() takes signs and spaces */
        return false;
    errno = 0;
    *value = strtoull(*text, &end, 10);
    suffix = *end ? strchr(suffixes, *end) : NULL;
    shift = suffix ? 10 * ((int)(suffix - suffixes) % 3 + 1) : 0;
    *text = end + (suffix ? 1 : 0);
    if (errno || *value > UINT64_MAX >> shift)
        return false;
    *value <<= shift;
    return true;
}

static bool add_value(const struct option_row *row, struct option_list *list, uint64_t value)
{
    if (list->count == OPTION_LIST_MAX || value < row->min || value > row->max)
        return false;
    list->value[list->count++] = value;
    return true;
}

/* TO, TO:xFACTOR or TO:+STEP, at *text. */
static bool add_range(const struct option_row *row, struct option_list *list, uint64_t from, const char **text)
{
    uint64_t to, step = row->factor;
    bool times = true;

    if (!option_number(text, &to) || to < from)
        return false;
    if (**text == ':') {
        times = (*text)[1] == 'x';
        if (!times && (*text)[1] != '+')
            return false;
        *text += 2;
        if (!option_number(text, &step))
            return false;
    }
    if (step < (times ? 2 : 1) || (times && step > FACTOR_MAX))
        return false;
    for (uint64_t value = from; value <= to; value = !times ? value + step : value ? value * step : 1) {
        if (!add_value(row, list, value))
            return false;
        if (times ? value > UINT64_MAX / step : value > UINT64_MAX - step)
            break;
    }
    return true;
}

static bool add_word(const struct option_row *row, struct option_list *list, const char **text)
{
    size_t length = strcspn(*text, ",");
    uint64_t value;

    for (uint64_t i = 0; row->names && row->names[i]; i++) {
        if (strlen(row->names[i]) != length || memcmp(row->names[i], *text, length) || list->count == OPTION_LIST_MAX)
            continue;
        list->value[list->count++] = i + (row->kind == OPTION_NUMBERS ? row->max + 1 : 0);
        *text += length;
        return true;
    }
    if (row->kind == OPTION_CHOICES || !option_number(text, &value))
        return false;
    if (**text != ':')
        return add_value(row, list, value);
    ++*text;
    return add_range(row, list, value, text);
}

static bool parse_list(const struct option_row *row, struct option_list *list, const char *text)
{
    for (list->count = 0; add_word(row, list, &text); text++)
        if (*text != ',')
            return *text == '\0';
    return false;
}

static void store(void *field, size_t bytes, uint64_t value)
{
    if (bytes == sizeof(uint8_t))
        *(uint8_t *)field = (uint8_t)value;
    else if (bytes == sizeof(uint32_t))
        *(uint32_t *)field = (uint32_t)value;
    else if (bytes == sizeof(uint64_t))
        *(uint64_t *)field = value;
}

static bool take_value(const struct option_row *row, void *options, const char *text)
{
    void *field = (char *)options + row->field;
    uint64_t value = row->min;

    switch (row->kind) {
    case OPTION_SET:
        break;
    case OPTION_NUMBER:
        if (!option_number(&text, &value) || *text || value < row->min || value > row->max)
            return false;
        break;
    case OPTION_CHOICE:
        for (value = 0; row->names[value] && strcmp(row->names[value], text);)
            value++;
        if (!row->names[value])
            return false;
        break;
    case OPTION_TEXT:
        *(const char **)field = text;
        return true;
    case OPTION_PARSED:
        return row->parse(options, text);
    default:
        return parse_list(row, field, text);
    }
    store(field, row->bytes, value);
    return true;
}

void option_table_set(const struct option_table *table, void *options, const char *name, const char *text)
{
    for (uint32_t i = 0; i < table->count; i++)
        if (!strcmp(table->rows[i].name, name) && !take_value(&table->rows[i], options, text))
            refuse_value(table, &table->rows[i], text);
}

int option_table_parse(const struct option_table *table, void *options, int argc, char **argv)
{
    struct option rows[ROWS_MAX + 3] = {{0}};
    int index = 0, c;

    if (!stdout_program) /* a program may have two command lines */
        stdout_check_at_exit(table->program);
    for (uint32_t i = 0; i < table->count && i < ROWS_MAX; i++)
        rows[i] = (struct option){table->rows[i].name, table->rows[i].value_name ? 1 : 0, NULL, 0};
    rows[table->count] = (struct option){"help", 0, NULL, 'h'};
    rows[table->count + 1] = (struct option){"version", 0, NULL, 'v'};
    optind = 0; /* getopt_long() starts again, also for a program's second command line */
    while ((c = getopt_long(argc, argv, ":h", rows, &index)) != -1) {
        if (c == 'h') {
            print_help(table);
            exit(0);
        }
        if (c == 'v') {
            printf("%s %s\n", table->program, PRS_VERSION);
            exit(0);
        }
        if (c == ':')
            option_table_refuse(table, "%s: needs a value", argv[optind - 1]);
        if (c)
            option_table_refuse(table, "'%s' is not an option", argv[optind - 1]);
        if (!take_value(&table->rows[index], options, optarg))
            refuse_value(table, &table->rows[index], optarg);
    }
    return optind;
}
