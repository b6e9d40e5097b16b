def uld(top_logprob, foreign_logprob, *, rest="bucket"):
    """sum_k |p_(k) - q_(k)|, the probabilities of student and teacher sorted, the largest first: tokens need
    not match, so the teacher may have another tokenizer (universal logit distillation, Boizard et al. 2024).

    `foreign_logprob` (rows, J) is an input, the teacher's J largest log-probabilities in any order, -inf for none:
    `hl.topk(teacher, J).logprobs`.  The student's K are set by `hl.Term(uld, top=K)`, 8 by default.

    rest "bucket"  what is beyond min(K, J) is one more outcome on each side, |sum p - sum q|
    rest "none"    it is left out

    Row n of the teacher is compared with row n of the student: if the tokenizers split the text differently there,
    leave the row out with a target of -100 or a row weight of 0.

    In trainers: TRL GOLDTrainer, use_uld_loss without use_extended_uld, which merges tokens.
    """
    counts = _counts(rest)
    if foreign_logprob.ndim != 2:
        raise ValueError("foreign_logprob: wanted J log-probabilities per row, got one number per row")
    q = foreign_logprob.detach().to(top_logprob.dtype).exp().sort(-1, descending=True).values
    both = min(q.shape[-1], top_logprob.shape[-1])
    p, q = top_logprob[:, :both].exp(), q[:, :both]
    student, teacher = p.sum(-1), q.sum(-1)
    loss = (p - q).abs().sum(-1)
    loss = loss + (student - teacher).abs() if counts else loss
    return loss, {"student_mass": student, "teacher_mass": teacher}


def _counts(rest):
    if rest not in ("bucket", "none"):
        raise ValueError(f"rest: wanted 'bucket' or 'none', got {rest!r}")
    return rest == "bucket"


uld.top = 8
