// What breaks a GPU, for tests of what happens then.

extern "C" __global__ void touch_nowhere(u64 address) {
  *reinterpret_cast<volatile int*>(address) = 1;
}

extern "C" __global__ void never_ends(u64 until) {
  for (u64 turns = 0; turns != until; turns += 2) __nanosleep(1000);
}
