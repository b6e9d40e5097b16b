def cosine(logit_dot, logit_square, teacher_logit_square):
    """1 - cos(z, u): the angle between the student's and the teacher's logits, over the columns that both have.  A
    temperature does not change it, one number added to all logits does; a logit of -inf makes it NaN.

    In trainers: Liger LigerFusedLinearCosineSimilarityLoss, whose beta is the weight.
    """
    cos = logit_dot / (logit_square * teacher_logit_square).clamp(min=1e-24).sqrt()
    return 1 - cos, {"cosine": cos}
