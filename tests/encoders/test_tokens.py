from __future__ import annotations

from offsphere.encoders import limit_length, token_counts, token_limit


def tokens_read(encoder, text: str) -> int:
    features = encoder.preprocess([text])
    return int(features["attention_mask"].sum()) if "attention_mask" in features else len(features["input_ids"])


def test_tokens_are_counted_as_the_encoder_reads_them_but_before_any_cut(encoder):
    texts = ["the sun the moon", "ice", "a bee dance a bee a bee"]
    counts = token_counts(encoder, texts)
    assert counts.tolist() == [tokens_read(encoder, text) for text in texts]
    limit_length(encoder, 4)
    assert token_limit(encoder) == 4
    assert token_counts(encoder, texts).tolist() == counts.tolist()
    assert [min(count, 4) for count in counts] == [tokens_read(encoder, text) for text in texts]
    assert token_counts(encoder, []).shape == (0,)


def test_special_tokens_count_where_the_encoder_adds_them(static, transformer):
    assert token_counts(static, ["sun the moon"]).tolist() == [3]
    assert token_counts(transformer, ["sun the moon"]).tolist() == [5]
    assert token_limit(static) is None
