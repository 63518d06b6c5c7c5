"""A fitted classifier as an ONNX graph, in float64. Needs `pip install 'bilevax[onnx]'`.

    s = X·coefᵀ + intercept,  p = (1 − σ(s), σ(s)) or softmax(s),  label = classes[argmax p]

A graph has no words for what a raw cell may be. Of a pipeline that begins with a `TableReader` the
graph is what follows it, and `graph_inputs` reads raw rows for it: numbers, NaN where one is
missing, and categories, "(missing)" where one is. Any text can name a column, but not an input: the
inputs are column0, column1, …, in the order of the reader's columns, and each one's `doc_string` is
the name of its column.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder

from bilevax.files import write_bytes
from bilevax.learn._base import RobustClassifier
from bilevax.learn.reader import TableReader

#: The version of ONNX's operators, which onnxruntime has had since 1.14.
OPSET = {"": 18, "ai.onnx.ml": 3}


def to_onnx(model: Any) -> Any:
    """The graph of a fitted pipeline or classifier, with the outputs `label` and `probabilities`.

    Labels that are truth values become 0 and 1.
    A pipeline that begins with a `TableReader` has an input for each column, others have one, `X`.
    """
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import DoubleTensorType, StringTensorType

    _register(type(_classifier(model)))
    reader = _reader(model)
    own: dict[str, Any] = {}
    if reader is None:
        inputs = [("X", DoubleTensorType([None, model.n_features_in_]))]
    else:
        of = lambda kind: (StringTensorType if kind == "category" else DoubleTensorType)([None, 1])
        names = input_names(reader)
        inputs = [(names[name], of(column["kind"])) for name, column in reader.columns_.items()]
        model = Pipeline([(step, _renamed(part, names)) for step, part in model.steps[1:]])
        own = {
            "custom_conversion_functions": {SimpleImputer: _imputer, OneHotEncoder: _one_hot},
            "custom_shape_calculators": {SimpleImputer: _wide, OneHotEncoder: _wide},
        }
    graph: Any = convert_sklearn(
        model,
        initial_types=inputs,
        target_opset=OPSET,
        options={id(_classifier(model)): {"zipmap": False}},
        **own,
    )
    for source, column in zip(graph.graph.input, reader.columns_ if reader else ()):
        source.doc_string = column
    return graph


def save_onnx(model: Any, path: str | Path) -> None:
    """Write the graph of a fitted pipeline or classifier; refuse one onnxruntime cannot load."""
    graph = to_onnx(model).SerializeToString()
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        try:
            onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"the graph of this model cannot be loaded: {error}") from None
    write_bytes(path, graph)


def input_names(reader: TableReader) -> dict[str, str]:
    """The graph's input for each column."""
    return {column: f"column{place}" for place, column in enumerate(reader.columns_)}


def _renamed(part: Any, names: dict[str, str]) -> Any:
    """A step whose columns, if it picks columns, are called as the graph's inputs."""
    if not isinstance(part, ColumnTransformer):
        return part
    part = copy.copy(part)
    part.transformers_ = [
        (step, own, [names[column] for column in columns])
        for step, own, columns in part.transformers_
        if len(columns)
    ]
    return part


def graph_inputs(model: Any, X: Any) -> dict[str, np.ndarray]:
    """Rows as the graph of a model takes them."""
    reader = _reader(model)
    if reader is None:
        return {"X": np.asarray(X, dtype=np.float64)}
    read: pd.DataFrame = reader.transform(X)
    return {name: read[[column]].to_numpy() for column, name in input_names(reader).items()}


def _classifier(model: Any) -> RobustClassifier:
    last = model[-1] if isinstance(model, Pipeline) else model
    if not isinstance(last, RobustClassifier):
        raise TypeError(f"a classifier of bilevax.learn, or a pipeline with one, not {type(last)}")
    return last


def _reader(model: Any) -> TableReader | None:
    first = model[0] if isinstance(model, Pipeline) else None
    return first if isinstance(first, TableReader) else None


def _register(kind: type) -> None:
    from skl2onnx import update_registered_converter

    options = {"zipmap": [True, False, "columns"], "nocl": [True, False]}
    options["output_class_labels"] = [True, False]
    update_registered_converter(kind, f"Bilevax{kind.__name__}", _outputs, _linear, options=options)


def _outputs(operator: Any) -> None:
    """A label and a probability of each class for each row."""
    from skl2onnx.common.data_types import DoubleTensorType, Int64TensorType, StringTensorType

    classes = operator.raw_operator.classes_
    kind = Int64TensorType if classes.dtype.kind in "iub" else StringTensorType
    operator.outputs[0].type = kind([None])
    operator.outputs[1].type = DoubleTensorType([None, len(classes)])


def _ops(container: Any) -> Any:
    """The operators of ONNX, all of the version asked for."""
    from skl2onnx.algebra import onnx_ops

    return lambda name, *inputs, **given: getattr(onnx_ops, f"Onnx{name}")(
        *inputs, op_version=container.target_opset, **given
    )


def _linear(scope: Any, operator: Any, container: Any) -> None:
    """The label of the highest score, and the probabilities."""
    op, model = _ops(container), operator.raw_operator
    label, probabilities = operator.outputs
    scores = op("Add", op("MatMul", operator.inputs[0], model.coef_.T), model.intercept_)
    if len(model.classes_) == 2:
        scores = op("Concat", op("Neg", scores), scores, axis=1)
        found = op("Sigmoid", scores, output_names=[probabilities])
    else:
        found = op("Softmax", scores, axis=1, output_names=[probabilities])
    classes = model.classes_
    classes = classes.astype(np.int64 if classes.dtype.kind in "iub" else str)
    best = op("ArgMax", scores, axis=1, keepdims=0)
    chosen = op("Gather", classes, best, axis=0, output_names=[label])
    found.add_to(scope, container)
    chosen.add_to(scope, container)


def _wide(operator: Any) -> None:
    """As many columns as scikit-learn's transformer makes."""
    from skl2onnx.common.data_types import DoubleTensorType

    columns = len(operator.raw_operator.get_feature_names_out())
    operator.outputs[0].type = DoubleTensorType([None, columns])


def _imputer(scope: Any, operator: Any, container: Any) -> None:
    """x where there is one, else the statistic; then 1 where there was none, else 0."""
    from skl2onnx.proto import onnx_proto

    op, model = _ops(container), operator.raw_operator
    x = op("Concat", *operator.inputs, axis=1)
    missing = op("IsNaN", x)
    kept = np.flatnonzero(~np.isnan(model.statistics_))  # not those that were never there
    filled = op("Where", missing, model.statistics_[None, :], x)
    parts = [op("Gather", filled, kept, axis=1)]
    if model.indicator_ is not None and len(model.indicator_.features_):
        told = op("Cast", missing, to=onnx_proto.TensorProto.DOUBLE)
        parts.append(op("Gather", told, model.indicator_.features_.astype(np.int64), axis=1))
    op("Concat", *parts, axis=1, output_names=operator.outputs).add_to(scope, container)


def _one_hot(scope: Any, operator: Any, container: Any) -> None:
    """A column for each frequent category, then one for rare and unknown ones if some are rare."""
    from skl2onnx.algebra import onnx_ops
    from skl2onnx.proto import onnx_proto

    op, model, parts = _ops(container), operator.raw_operator, []
    inputs = [
        op("Gather", source, np.array([j]), axis=1)
        for source in operator.inputs
        for j in range(source.type.shape[1])
    ]
    for source, categories, rare in zip(inputs, model.categories_, model.infrequent_categories_):
        rare = np.array([], dtype=object) if rare is None else rare
        frequent = categories[~np.isin(categories, rare)]
        places = {str(name): place for place, name in enumerate(frequent)}
        code = onnx_ops.OnnxLabelEncoder(  # pyright: ignore[reportAttributeAccessIssue]
            source,
            keys_strings=list(places),
            values_int64s=list(places.values()),
            default_int64=len(frequent) if len(rare) else -1,
            op_version=OPSET["ai.onnx.ml"],
        )
        columns = np.arange(len(frequent) + bool(len(rare)))[None, :]
        parts.append(op("Cast", op("Equal", code, columns), to=onnx_proto.TensorProto.DOUBLE))
    op("Concat", *parts, axis=1, output_names=operator.outputs).add_to(scope, container)
