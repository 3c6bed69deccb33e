/* Uniform random numbers for one instruction set: Philox 4x32-10, bitwise identical to random/philox.py. _native.c
 * includes this file once per instruction set, after defining
 *   NAME(x)     the name of a function for this instruction set,
 *   LANES       the number of words per vector (4, 8 or 16),
 *   EVEN(a, b)  the 64-bit products of the words at even positions in two vectors. */

typedef float NAME(Floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(Ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(Words) __attribute__((vector_size(4 * LANES)));
typedef uint64_t NAME(Pairs) __attribute__((vector_size(4 * LANES)));
#define Floats NAME(Floats)
#define Ints NAME(Ints)
#define Words NAME(Words)
#define Pairs NAME(Pairs)

/* Multiply all words by a number, and return the upper and lower halves of the products. */
INLINE void NAME(multiply)(const Words *words, uint32_t number, Words *high, Words *low)
{
    const Words factor = *words * 0 + number;
    const Pairs even = EVEN(*words, factor);
    const Words shifted = (Words)((Pairs)*words >> 32);
    const Pairs odd = EVEN(shifted, factor);
    *high = (Words)((even >> 32) | (odd & 0xffffffff00000000u));
    *low = (Words)((even & 0x00000000ffffffffu) | (odd << 32));
}

/* Convert words to floats in the open interval (0, 1). */
INLINE void NAME(to_unit_interval)(const Words *words, float *out)
{
    const Floats numbers = (__builtin_convertvector((Ints)(*words >> 9), Floats) + 0.5f) * 0x1p-23f;
    memcpy(out, &numbers, sizeof numbers);
}

/* Compute the random numbers for the counters (quad + i, row, step, draw), where i = 0, ..., LANES - 1. Each counter gives
 * four consecutive numbers. */
INLINE void NAME(numbers)(uint32_t quad, uint32_t row, uint32_t step, uint32_t draw, uint64_t key, float *out)
{
    const Words zero = {0};
    Words c0, c1 = zero + row, c2 = zero + step, c3 = zero + draw;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < LANES; i++) c0[i] = quad + i;
    for (int round = 0; round < ROUNDS; round++) {
        Words high0, low0, high1, low1;
        NAME(multiply)(&c0, 0xD2511F53u, &high0, &low0);
        NAME(multiply)(&c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    float words[4][LANES];
    NAME(to_unit_interval)(&c0, words[0]);
    NAME(to_unit_interval)(&c1, words[1]);
    NAME(to_unit_interval)(&c2, words[2]);
    NAME(to_unit_interval)(&c3, words[3]);
    for (int i = 0; i < LANES; i += 4) transpose(words[0] + i, words[1] + i, words[2] + i, words[3] + i, out + 4 * i);
}

/* Fill rows `first` to `last` - 1 of an array of shape (rows, lines, columns). If the number of columns is odd, the last
 * column comes after all others (see random/philox.py). */
static void NAME(uniform)(const Uniform *array, int64_t first, int64_t last)
{
    const int64_t lines = array->lines, columns = array->columns, size = lines * columns;
    const int64_t pitch = columns > 1 && lines > 1 ? columns - columns % 2 : columns;
    float drawn[4 * LANES];
    for (int64_t row = first; row < last; row++) {
        const uint32_t number = array->first_row + (uint32_t)row;
        float *const out = array->out + row * size;
        int64_t line = 0, column = 0;
        for (int64_t place = 0; place < size; place += 4 * LANES) {
            const int64_t count = size - place < 4 * LANES ? size - place : 4 * LANES;
            float *const into = pitch == columns && count == 4 * LANES ? out + place : drawn;
            NAME(numbers)((uint32_t)(place / 4), number, array->step, array->draw, array->key, into);
            if (into != drawn) continue;
            if (pitch == columns) {
                memcpy(out + place, drawn, sizeof(float) * count);
                continue;
            }
            int64_t i = 0;
            while (i < count && line < lines) {
                const int64_t n = pitch - column < count - i ? pitch - column : count - i;
                memcpy(out + line * columns + column, drawn + i, sizeof(float) * n);
                i += n;
                column += n;
                if (column == pitch) {
                    column = 0;
                    line++;
                }
            }
            for (; i < count; i++, line++) out[(line - lines) * columns + pitch] = drawn[i]; /* the last column */
        }
    }
}

#undef Floats
#undef Ints
#undef Words
#undef Pairs
#undef EVEN
