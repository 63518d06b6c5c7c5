"""The problems that people bring, by name."""

from __future__ import annotations

import people_cleaning
import people_groups
import people_lasso
import people_qcqp
import people_ridge
import people_svm

PEOPLE = {
    "ridge": people_ridge.one_weight,
    "ridge in units": people_ridge.in_units,
    "ridge unbounded": people_ridge.unbounded,
    "ridge a feature": people_ridge.weight_a_feature,
    "hyper-cleaning": people_cleaning.cleaning,
    "lasso constraint": people_lasso.split_in_two,
    "lasso literal": people_lasso.literal,
    "lasso saddle": people_lasso.saddle,
    "svm bounds": people_svm.bounded,
    "qcqp small": people_qcqp.small,
    "qcqp medium": people_qcqp.medium,
    "qcqp large": people_qcqp.large,
    "groups 600": people_groups.few,
    "groups 1500": people_groups.many,
    "svm rows": people_svm.weighted,
}
