def uld(top_logprob, foreign_logprob, *, rest="bucket"):
    """sum_k |p_(k) - q_(k)|, the probabilities of student and teacher sorted, the largest first: no token has to be
    matched, so the teacher may have another tokenizer (universal logit distillation, Boizard et al. 2024).

    `foreign_logprob` (rows, J) is an input, the teacher's J largest log-probabilities in any order, -inf for none:
    `hl.topk(teacher, J).logprobs`.  The student's are its K largest, `hl.Term(uld, top=K)`; K is 8 by default.

    rest   "bucket": beyond min(K, J) the rest of both is one more outcome, |sum p - sum q|    "none": it is left out

    With "bucket", all of both vocabularies give the whole sum.  Row n of the teacher stands for row n of the student:
    where the two cut the text differently, a target of -100 or a row weight of 0 leaves the row out.

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
