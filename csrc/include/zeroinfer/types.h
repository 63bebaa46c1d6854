/* Element types that kernels read; the values are part of the ABI. */
#ifndef ZEROINFER_TYPES_H
#define ZEROINFER_TYPES_H

typedef enum zi_dtype {
	ZI_F32 = 0,
	ZI_BF16 = 1,
	ZI_F16 = 2,
} zi_dtype;

#endif
