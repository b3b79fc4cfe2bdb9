/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/json.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the UTF-8 character at text, which ends with a zero byte; 0 when it is not one. */
static int utf8_length(const unsigned char *text)
{
    int length = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;
    unsigned second = text[0] << 8 | (length > 1 ? text[1] : 0);

    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    /* An encoding that is too long, a surrogate, or beyond U+10FFFF. */
    if ((second >= 0xe000 && second < 0xe0a0) || (second >= 0xeda0 && second < 0xee00) ||
        (second >= 0xf000 && second < 0xf090) || second >= 0xf490)
        return 0;
    return length;
}

static void print_string(FILE *to, const char *string)
{
    const unsigned char *text = (const unsigned char *)string;

    putc('"', to);
    while (*text) {
        int length = utf8_length(text);

        if (length == 0)
            fputs("\\ufffd", to);
        else if (*text == '"' || *text == '\\')
            fprintf(to, "\\%c", *text);
        else if (*text < 0x20)
            fprintf(to, "\\u%04x", *text);
        else
            fwrite(text, 1, (size_t)length, to);
        text += length ? length : 1;
    }
    putc('"', to);
}

/* A word of the format: a name, or one of JSON's own words. Return its length. */
static size_t print_word(FILE *to, const char *word)
{
    static const char *const own[] = {"true", "false", "null"};
    size_t length = 0;
    bool quoted = true;

    while (isalnum((unsigned char)word[length]) || word[length] == '_')
        length++;
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        quoted &= strlen(own[i]) != length || memcmp(own[i], word, length) != 0;
    fprintf(to, quoted ? "\"%.*s\"" : "%.*s", (int)length, word);
    return length;
}

static void print_real(FILE *to, const char *conversion, double value)
{
    if (!isfinite(value))
        fputs("null", to);
    else
        fprintf(to, conversion, value);
}

/* A conversion of printf(), at its '%'. Return its length. */
static size_t print_value(FILE *to, const char *at, va_list *args)
{
    size_t length = 1 + strspn(at + 1, "0123456789.#hlz");
    char conversion[16] = "", kind = at[length++];
    bool is_long = memchr(at, 'l', length) || memchr(at, 'z', length);

    memcpy(conversion, at, length < sizeof(conversion) ? length : sizeof(conversion) - 1);
    if (kind == 's')
        print_string(to, va_arg(*args, const char *));
    else if (kind == 'f' || kind == 'e' || kind == 'g')
        print_real(to, conversion, va_arg(*args, double));
    else if (!strcmp(conversion, "%hhd"))
        fputs(va_arg(*args, int) ? "true" : "false", to);
    else if (is_long) /* long, long long and size_t have 64 bits alike */
        fprintf(to, conversion, va_arg(*args, uint64_t));
    else
        fprintf(to, conversion, va_arg(*args, unsigned));
    return length;
}

void json_print(FILE *to, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    while (*format) {
        if (*format == '%')
            format += print_value(to, format, &args);
        else if (isalpha((unsigned char)*format))
            format += print_word(to, format);
        else
            putc(*format++, to);
    }
    va_end(args);
}
