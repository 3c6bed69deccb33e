/* Log-odds of each binary site given all other sites, for the pseudo-likelihood. pseudo.py defines the array layout.
 *
 * Let p and q be the probabilities that a hidden unit is 1 and 0. If the unit's field increases by d, its normalizer is
 * multiplied by q + p exp(d). The log-odds of a site are the logarithm of the product of these factors over all hidden
 * units, which takes two multiplications and one addition per unit, and one logarithm per site. The mantissa and the
 * exponent of each product are stored separately to avoid overflow.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define CHAINS 4 /* number of independent products, to hide the latency of multiplications */
#define PAD (LANES * CHAINS)
#define EACH_CHAIN _Pragma("GCC unroll 4") for (int c = 0; c < CHAINS; c++) /* unrolled, so that values stay in registers */
#define SAMPLES 8 /* number of samples whose probabilities fit in the L1 cache together */

/* Compile several versions of a function. The dynamic loader selects the best one for the processor. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    Floats mantissa[CHAINS];
    Ints exponent[CHAINS];
} Product;

INLINE Product one(void)
{
    Product product;
    EACH_CHAIN {
        product.mantissa[c] = (Floats){0} + 1.0f;
        product.exponent[c] = (Ints){0};
    }
    return product;
}

/* Move the exponents of the mantissas, which must be positive normal numbers, to the separate exponents. */
INLINE void split(Product *product)
{
    EACH_CHAIN {
        const Ints bits = (Ints)product->mantissa[c];
        product->exponent[c] += (bits >> 23) - 127;
        product->mantissa[c] = (Floats)((bits & 0x7fffff) | 0x3f800000);
    }
}

INLINE float logarithm(Product product)
{
    Floats mantissas = {0};
    Ints exponents = {0};
    float mantissa = 1;
    int32_t exponent = 0;
    split(&product);
    mantissas += 1.0f;
    EACH_CHAIN {
        mantissas *= product.mantissa[c];
        exponents += product.exponent[c];
    }
    for (int lane = 0; lane < LANES; lane++) {
        mantissa *= mantissas[lane];
        exponent += exponents[lane];
    }
    return (float)(log(mantissa) + exponent * 0.69314718055994530942);
}

/* Replace numbers between -80 and 80 with their exponentials, computed from a power of two and a polynomial as in the
 * Cephes library. The relative error is about 1e-7. */
INLINE void exponential(Floats *number)
{
    const Floats x = *number;
    const Floats shifted = x * 1.44269504088896341f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    const Floats whole = shifted - 12582912.0f;
    const Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    *number = y * (Floats)(((Ints)shifted - 0x4b400000 + 127) << 23);
}

#define AT(array, k) (*(const Floats *)((array) + (k)))

INLINE float log_growth(const float *p, const float *q, const float *factor, int64_t hidden, int64_t group)
{
    Product product = one();
    for (int64_t k = 0; k < hidden;) {
        for (int64_t g = 0; g < group && k < hidden; g++, k += PAD)
            EACH_CHAIN {
                const int64_t at = k + c * LANES;
                product.mantissa[c] *= AT(q, at) + AT(p, at) * AT(factor, at);
            }
        split(&product);
    }
    return logarithm(product);
}

/* Return the log-odds of a site that has a gray value: the logarithm of the normalizer with a 1 at the site, minus the
 * logarithm of the normalizer with a 0. */
INLINE float gray(const float *p, const float *q, const float *weight, const float *up, float value, int64_t hidden,
                  int64_t group)
{
    Product with_one = one(), with_zero = one();
    for (int64_t k = 0; k < hidden;) {
        for (int64_t g = 0; g < group && k < hidden; g++, k += PAD)
            EACH_CHAIN {
                const int64_t at = k + c * LANES;
                Floats zero = AT(weight, at) * -value;
                exponential(&zero);
                zero *= AT(p, at);
                with_one.mantissa[c] *= AT(q, at) + zero * AT(up, at);
                with_zero.mantissa[c] *= AT(q, at) + zero;
            }
        split(&with_one);
        split(&with_zero);
    }
    return logarithm(with_one) - logarithm(with_zero);
}

/* Compute the probabilities p and q that each hidden unit of a sample is 1 and 0. Fields must be finite. */
INLINE void probabilities(const float *field, const float *bias, int64_t hidden, int64_t padded, float *p, float *q)
{
    for (int64_t k = 0; k < hidden; k++) {
        const float total = field[k] + bias[k];
        q[k] = total < -80 ? -80 : total > 80 ? 80 : total;
    }
    for (int64_t k = hidden; k < padded; k++) q[k] = -80; /* makes p zero in the padding */
    for (int64_t k = 0; k < padded; k += LANES) {
        Floats odds = -AT(q, k);
        exponential(&odds);
        *(Floats *)(p + k) = 1 / (1 + odds);
        *(Floats *)(q + k) = odds / (1 + odds);
    }
}

FOR_EVERY_PROCESSOR
static void log_odds(const float *field, const float *bias, const float *weights, const float *up, const float *down,
                     const float *x, float *out, float *scratch, int64_t n, int64_t sites, int64_t hidden,
                     int64_t padded, int64_t group)
{
    for (int64_t first = 0; first < n; first += SAMPLES) {
        const int64_t count = n - first < SAMPLES ? n - first : SAMPLES;
        float *const p = scratch, *const q = scratch + SAMPLES * padded;
        for (int64_t i = 0; i < count; i++)
            probabilities(field + (first + i) * hidden, bias, hidden, padded, p + i * padded, q + i * padded);
        for (int64_t site = 0; site < sites; site++) {
            const int64_t row = site * padded;
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = (first + i) * sites + site;
                const float *const pi = p + i * padded, *const qi = q + i * padded;
                if (x[at] == 0) out[at] = log_growth(pi, qi, up + row, padded, group);
                else if (x[at] == 1) out[at] = -log_growth(pi, qi, down + row, padded, group);
                else out[at] = gray(pi, qi, weights + row, up + row, x[at], padded, group);
            }
        }
    }
}

static PyObject *py_log_odds(PyObject *module, PyObject *args)
{
    unsigned long long field, bias, weights, up, down, x, out;
    Py_ssize_t n, sites, hidden, group;
    if (!PyArg_ParseTuple(args, "KKKKKKKnnnn", &field, &bias, &weights, &up, &down, &x, &out, &n, &sites, &hidden, &group))
        return NULL;
    const int64_t padded = (hidden + PAD - 1) / PAD * PAD;
    void *scratch;
    if (posix_memalign(&scratch, 64, 2 * SAMPLES * padded * sizeof(float))) return PyErr_NoMemory();
#define FLOATS(address) ((float *)(uintptr_t)(address))
    Py_BEGIN_ALLOW_THREADS
    log_odds(FLOATS(field), FLOATS(bias), FLOATS(weights), FLOATS(up), FLOATS(down), FLOATS(x), FLOATS(out), scratch, n,
             sites, hidden, padded, group);
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"log_odds", py_log_odds, METH_VARARGS, "Compute log-odds of sites. The arguments are addresses of arrays, sizes, and the number of factors between splits."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pseudo", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pseudo(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddIntConstant(module, "PAD", PAD)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
