"""The problems that people bring, by name, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Callable

import people_cleaning
import people_closed_form
import people_coupled
import people_groups
import people_inverse
import people_lasso
import people_portfolio
import people_qcqp
import people_ridge
import people_robust
import people_sparse
import people_svm
import people_tolls
import people_toys
from people_instance import Person

PEOPLE: dict[str, Callable[[], Person]] = {
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
    "robust radius": people_robust.radius,
    "adversarial targets": people_robust.targets,
    "inverse": people_inverse.inverse,
    "tail portfolio": people_portfolio.tail,
    "toy linear": people_toys.linear,
    "toy cubic": people_toys.cubic,
    "many minima": people_toys.wavy,
    "coupled": people_coupled.coupled,
    "tolls filling": people_tolls.filling,
    "elastic net 250": people_sparse.net,
    "elastic net 2500": people_sparse.wide_net,
    "group lasso 600": people_sparse.group_lasso,
    "group lasso 1200": people_sparse.wide_group_lasso,
    "svm rows": people_svm.weighted,
    "closed form": people_closed_form.closed_form,
    "tolls linear": people_tolls.linear,
}
