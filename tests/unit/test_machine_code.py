"""Reading disassemblies: which accesses to local memory are in the main loop, which once a tile, which outside."""

from __future__ import annotations

from scripts.machine_code import parse

TEXT = """
	Function : w8a8_kernel
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
        /*0010*/                   STL [R1], R2 ;                  /* 0x0000000201007387 */
        /*0100*/                   LDL R4, [R1+0x8] ;              /* 0x0000080001047983 */
        /*0110*/              @!P0 STL.64 [R1+0x10], R8 ;          /* 0x0000100801008387 */
        /*0200*/                   LDL R7, [R1] ;                  /* 0x0000000001077983 */
        /*0210*/                   IMMA.16832.S8.S8.SAT R12, R4.ROW, R6.COL, R12 ;   /* 0x0 */
        /*0220*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;   /* 0x0 */
        /*0230*/              @P1  BRA 0x1f0 ;                     /* 0x0 */
        /*0240*/                   IMMA.16832.S8.S8.SAT R12, R4.ROW, R6.COL, R12 ;   /* 0x0 */
        /*0300*/                   BRA 0x100 ;                     /* 0x0 */
        /*0310*/                   STL [R1], R2 ;                  /* 0x0 */
        /*0320*/                   BRA 0x310 ;                     /* 0x0 */
        /*0330*/                   BRA 0x400 ;                     /* 0x0 */
        /*0334*/              @P2  EXIT ;                          /* 0x0 */
        /*0338*/                   EXIT ;                          /* 0x0 */
        /*033c*/                   BRA 0x200 ;                     /* 0x0 */
        /*0340*/                   UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8] ;  /* 0x0 */
"""


def test_accesses_are_told_apart_by_loops() -> None:
    code = parse(TEXT)
    assert list(code.multiply.values()) == ["IMMA.16832.S8.S8.SAT"] * 2 + ["UTCQMMA.2CTA"]
    assert code.local == (0x10, 0x100, 0x110, 0x200, 0x310)
    assert code.loops == ((0x1F0, 0x230), (0x100, 0x300), (0x310, 0x320))
    # One in the loop along k; three in the loop over tiles around it; the loop at the end multiplies nothing.
    assert code.local_in_loops() == (1, 3)


def test_nothing_to_find() -> None:
    code = parse("no disassembly")
    assert not code.multiply and code.local_in_loops() == (0, 0)
