/* SPDX-License-Identifier: Apache-2.0 */
/* A command line by a table: each row names an option, says in which field of the program's options its value goes, and
 * which values are allowed. Usable from C and from C++. Wrong options end the program with status 2 and a line on
 * stderr that names the option, the value and what is allowed. --help prints the table, --version the version, and both
 * end with status 0. */
#ifndef TOOLS_COMMON_OPTION_TABLE_H
#define TOOLS_COMMON_OPTION_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { OPTION_LIST_MAX = 512 };

struct option_list {
    uint32_t count;
    uint64_t value[OPTION_LIST_MAX];
};

enum option_kind {
    OPTION_SET,     /* takes no value; the field becomes min */
    OPTION_NUMBER,  /* from min to max; suffixes K, M and G count in 1024s */
    OPTION_TEXT,    /* a const char * */
    OPTION_CHOICE,  /* one of names; the field becomes its index */
    OPTION_NUMBERS, /* a struct option_list: a,b,c or FROM:TO:xFACTOR or FROM:TO:+STEP; names count from max + 1 */
    OPTION_CHOICES, /* a struct option_list of indices of names: a,b,c */
    OPTION_PARSED,  /* parse() reads it, and returns false when the value is not allowed */
};

struct option_row {
    enum option_kind kind;
    const char *name;       /* without the dashes */
    const char *value_name; /* for the help text; NULL: no value */
    const char *help;
    size_t field, bytes; /* OPTION_FIELD(); a number's has 1, 4 or 8 bytes; 0: none */
    uint64_t min, max;
    const char *const *names; /* ends with NULL */
    /* factor of a range FROM:TO that names none; 0: a range must name one */
    uint64_t factor;
    bool (*parse)(void *options, const char *text); /* OPTION_PARSED */
};

#define OPTION_FIELD(type, member) offsetof(type, member), sizeof(((type *)0)->member)
#define OPTION_PARSED_BY(function) 0, 0, 0, 0, NULL, 0, function

struct option_table {
    const char *program;
    const char *head, *tail; /* lines before and after the rows in the help text, with an example; tail may be NULL */
    const struct option_row *rows;
    uint32_t count;
};

/* Read argv into options, which hold the defaults. Return the index of the first word that is no option; all such words
 * are at the end of argv then. */
int option_table_parse(const struct option_table *table, void *options, int argc, char **argv);

/* Set one option as the command line would; used for defaults. */
void option_table_set(const struct option_table *table, void *options, const char *name, const char *text);

/* End the program with status 2. The text follows "program: ", and says what is wrong and what is allowed. */
void option_table_refuse(const struct option_table *table, const char *format, ...)
    __attribute__((noreturn, format(printf, 2, 3)));

/* Read a number at *text, which then points after it. Return false when there is none. */
bool option_number(const char **text, uint64_t *value);

#ifdef __cplusplus
}
#endif
#endif
