// How many threads a kernel of this library may use.
#pragma once

// Set by set_num_threads; OpenMP's own number until then. It is apart from OpenMP's because compiled pieces go by that
// one, and their small loops are done sooner by one thread where a matrix product wants all.
int num_threads();
