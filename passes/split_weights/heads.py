"""Products with columns, or rows, that are heads which do not divide over the ranks: the weight gets a dim of heads.

q = Reshape(MatMul(x, w : [768, 768@tp]), [.., 12, 64])     12 heads over 8: 96 columns each, one head and a half
q = Einsum("abk,khd->abhd", x, w : [768, 12@tp, 64])        2 heads each, but for the last two devices

Columns that are the heads of no device were gathered before attention, which each device then computed for all heads.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from irpar.analysis.cost.model import Cost
from irpar.analysis.weights.atoms import Atom, Atoms, follow, joined
from irpar.analysis.weights.by_heads import MOST_LEADING, ByHeads
from irpar.ir import Annotation, ArrayTensor, Builder, Module, Node, Tensor, TensorType, Value, clone_module
from irpar.ops.elementwise import BINARY, UNARY
from irpar.ops.facts import int_attribute
from irpar.sharding import DimSharding, IrparError, Sharding

from ..simplify_layout.chains import atoms_of, chain_of, erase_unread, goes_on, is_layout
from ..split_bias import bias_apart

_ELEMENTWISE = frozenset({*UNARY, *BINARY, "Cast"})
_REPEAT = frozenset({"Expand", "Tile"})
_MEET = frozenset({"MatMul", "Gemm", "Einsum", "Softmax", "Attention"})
"""Where keys meet queries: what is repeated behind that is something else."""
_MOST_FOLLOWED = 64
"""Values between a product and that."""
_WORTH_LAUNCHES = 0.8
"""Of what is sent: less than that is worth more collectives."""
_OLDEST = 12
"""The first opset with Einsum."""


@dataclass(frozen=True)
class _Product:
    """A product of matrices with a constant that nothing else reads.

    Attributes:
        node: a MatMul, or a Gemm.
        weight: the constant, in two dims.
        dequantize: a DequantizeLinear, by blocks, that the constant goes through first.
        turn: a Transpose between them.
        rows, columns: which dim of the constant is contracted, and which one the result has.
    """

    node: Node
    weight: Value
    dequantize: Node | None
    turn: Node | None
    rows: int
    columns: int

    @property
    def leading(self) -> tuple[int, ...]:
        """The dims of the result before that of the columns."""
        return self.node.result.shape[:-1]

    def takes(self, dim: int, size: int) -> bool:
        """Whether a dim of the constant may be one of heads of so many: blocks that share a scale are whole in each."""
        node = self.dequantize
        return (
            node is None or int_attribute(node, "axis", 1) % 2 != dim or not size % int_attribute(node, "block_size", 1)
        )

    def parts(self, dim: int) -> int:
        """Over how many devices a dim of the constant is sharded, as it was annotated."""
        return 1 if self.weight.sharding is None else self.weight.sharding.dim_parts(dim)


def take_heads_apart(module: Module, cost_of: Callable[[Module], Cost]) -> int:
    """Give weights of a module in global view a dim of heads, where these do not divide over the ranks.

    Taken are constants that are annotated, that one product of static shapes reads, of more heads than devices; of a
    head for each device or less, columns are gathered as before. So are those of a training step, whose parameters keep
    the dims that they have in the model. It is done where less is sent then; keys and values that are repeated for
    groups of queries stay as they are where that sends less.

    Args:
        module: it.
        cost_of: what a module would send, which it changes.

    Returns:
        How many.
    """
    if module.opsets.get("", 0) < _OLDEST or not any(map(_may_have_heads, _nodes(module))):
        return 0
    try:
        left = _cheapest(module, cost_of)
    except IrparError:
        return 0  # Completion refuses the module, and tells why.
    return 0 if left is None else _take_apart(module, left)


def _cheapest(module: Module, cost_of: Callable[[Module], Cost]) -> frozenset[str] | None:
    """Results of products whose columns stay as they are, where it sends least so; None where all weights stay."""
    products = [node.result for node in _nodes(module) if _sharded_product(node) is not None]
    repeated = frozenset(value.name for value in products if _is_repeated(value))
    tried: dict[frozenset[str], Cost] = {}
    for left in dict.fromkeys((frozenset[str](), repeated)):
        work = clone_module(module)
        if _take_apart(work, left):
            tried[left] = cost_of(work)
    if not tried:
        return None
    best = min(tried, key=tried.__getitem__)
    return best if _is_worth_it(tried[best], cost_of(clone_module(module))) else None


def _is_worth_it(cost: Cost, before: Cost) -> bool:
    """Whether less is sent; in more collectives only where it is clearly less."""
    (amount, launches), (was, fewer) = cost, before
    return cost < before if launches <= fewer else amount < _WORTH_LAUNCHES * was


def _take_apart(module: Module, left: Collection[str]) -> int:
    """Give all weights of a module heads that can have them, but for columns that make some results; how many."""
    return sum(_take_one_apart(module, node, left) for node in _nodes(module))


def _nodes(module: Module) -> list[Node]:
    return [node for graph in module.all_graphs() for node in graph if node.op_type in ("MatMul", "Gemm")]


def _may_have_heads(node: Node) -> bool:
    """Whether something would be done about a node; of a Gemm whose bias is still in the way, whether it may be."""
    product = _sharded_product(node)
    if product is None:
        return False
    return len(node.inputs) > 2 or _read_in_pieces(product) is not None or _made_of_pieces(product) is not None


def _take_one_apart(module: Module, node: Node, left: Collection[str]) -> bool:
    """The same of one weight; whether it got heads."""
    product = _sharded_product(node)
    if product is None:
        return False
    is_left = node.result.name in left
    if node.op_type == "Gemm" and len(node.inputs) > 2:
        product = _without_bias(product)
    if product is None:
        return False
    return (not is_left and _columns_apart(module, product)) or _rows_apart(module, product)


def _is_repeated(value: Value) -> bool:
    """Whether what is made of a value is repeated before it meets another one, as keys are for groups of queries."""
    met, left = {value}, [value]
    for each in left:
        for user in each.users:
            if user.op_type in _REPEAT and user.result.is_static and prod(user.result.shape) > prod(each.shape):
                return True
            if user.is_return or user.op_type in _MEET or len(left) > _MOST_FOLLOWED:
                continue
            left += [result for result in user.results if result not in met and result.is_static]
            met.update(left)
    return False


def _sharded_product(node: Node) -> _Product | None:
    product = _product(node)
    return None if product is None or (product.parts(0) == 1 and product.parts(1) == 1) else product


def _product(node: Node) -> _Product | None:
    if node.identity not in (("", "MatMul"), ("", "Gemm")) or node.strategy is not None:
        return None
    if not all(value.is_static for value in (*node.inputs, *node.results)) or len(node.inputs[0].shape) < 2:
        return None
    attributes = node.attributes
    if attributes.get("transA") or attributes.get("alpha", 1.0) != 1.0 or not node.result.dtype.is_float:
        return None
    weight, turn, dequantize = node.inputs[1], None, None
    is_turned = bool(attributes.get("transB"))
    if weight.node is not None and weight.node.op_type == "Transpose" and len(weight.uses) == 1:
        turn = weight.node
        weight, is_turned = turn.inputs[0], not is_turned
    if weight.node is not None and _has_blocks(weight.node) and len(weight.uses) == 1:
        dequantize = weight.node
        weight = dequantize.inputs[0]
    if not weight.is_constant or len(weight.uses) > 1 or len(weight.shape) != 2 or weight.graph is not node.graph:
        return None
    if len(node.result.shape) > MOST_LEADING:
        return None
    return _Product(node, weight, dequantize, turn, int(is_turned), int(not is_turned))


def _has_blocks(node: Node) -> bool:
    """Whether a node dequantizes a matrix by blocks, with scales that it alone reads: their dims are those of it."""
    return (
        node.identity == ("", "DequantizeLinear")
        and int_attribute(node, "block_size", 0) > 0
        and all(value.is_constant and len(value.shape) == 2 and len(value.uses) == 1 for value in node.inputs)
    )


def _without_bias(product: _Product) -> _Product | None:
    """A Gemm without its bias, which is added behind it."""
    node = product.node
    assert node.graph is not None
    builder = Builder(node.graph, {"": node.version}, before=node, like=node)
    total = bias_apart(node, builder)
    if total is None:
        return None
    name = node.result.name
    node.replace([total])
    total.rename(name)
    first = next(each for each in builder.made if each.op_type == "Gemm")
    return _product(first)


# -- columns --------------------------------------------------------------------------------------------------------


def _columns_apart(module: Module, product: _Product) -> bool:
    """Let a product give heads, where what reads it makes some of its columns."""
    found = _read_in_pieces(product)
    if found is None:
        return False
    steps, chain, atoms, size = found
    if not product.takes(product.columns, size):
        return False
    columns, leading = product.node.result.shape[-1], product.leading
    shape = *leading, columns // size, size
    value = _einsum(module, product, size, product.node.inputs[0], product.columns, shape)
    before = product.node.result
    for step in steps:
        operands = [value if each is before else each and _beside(module, each, size) for each in step.operands]
        type_ = TensorType(step.result.dtype, shape)
        value = _builder(step).op(step.op_type, operands, step.attributes, type=type_, name=step.result.name)
        before = step.result
    last = chain[-1]
    moved = Atoms(shape)
    moved.dims = [_of_heads(dim, len(leading), size) for dim in atoms.dims]
    plan = moved.plan(last.result.shape)
    _take_place(last, follow(plan, value, last.result.name, _builder(last)))
    erase_unread(chain[:-1])
    for step in (*reversed(steps), product.node):
        step.erase()
    return True


def _read_in_pieces(product: _Product) -> tuple[list[Node], list[Node], Atoms, int] | None:
    """The elementwise nodes behind a product, and what moves elements behind these so that columns are in pieces.

    Returns:
        Beside them what becomes of the dims, and how many columns stand in each of the largest pieces.
    """
    value, steps = product.node.result, list[Node]()
    while not (is_alone := _is_alone(value, product.node)) or not is_layout(value.users[0]):
        if not is_alone or not _is_step(value.users[0], value):
            return None
        steps.append(value.users[0])
        value = value.users[0].result
    chain = [value.users[0]]
    while goes_on(chain[-1]):
        chain.append(chain[-1].result.users[0])
    atoms = atoms_of(chain)
    if atoms is None:
        return None
    last = len(product.leading)
    size = max((inner for dim in atoms.dims for source, inner, _ in joined(dim) if source == last), default=1)
    is_apart = size > 1 and _divide_badly(product.node.result.shape[-1] // size, product.parts(product.columns))
    return (steps, chain, atoms, size) if is_apart else None


def _is_alone(value: Value, product: Node) -> bool:
    """Whether one node of the product's graph reads a value, and nobody has annotated it."""
    return len(value.uses) == 1 and value.sharding is None and value.users[0].graph is product.graph


def _of_heads(dim: list[Atom], last: int, size: int) -> list[Atom]:
    """The pieces of a dim, in those of a value that has heads and their elements where the other has columns."""
    found: list[Atom] = []
    for source, inner, count in dim:
        if source != last:
            found.append((source, inner, count))
        elif inner >= size:
            found.append((last, inner // size, count))
        else:
            found.append((last + 1, inner, count))
    return found


def _is_step(node: Node, value: Value) -> bool:
    """Whether a node does something with each element, and what else it reads are numbers for all, or for columns."""
    if node.is_return or node.domain or node.op_type not in _ELEMENTWISE or node.strategy is not None:
        return False
    others = [each for each in node.inputs if each is not value]
    columns = value.shape[-1]
    fits = all(each.is_constant and _fits(each, columns) for each in others)
    return fits and node.result.is_static and node.result.shape == value.shape


def _fits(value: Value, columns: int) -> bool:
    shape = value.shape
    is_for_columns = bool(shape) and prod(shape) == shape[-1] == columns and len(value.uses) == 1
    return prod(shape) == 1 or is_for_columns


def _beside(module: Module, value: Value, size: int) -> Value:
    """What a step reads besides, for heads of so many columns."""
    if prod(value.shape) > 1:
        _give_heads(module, value, len(value.shape) - 1, size)
    return value


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows_apart(module: Module, product: _Product) -> bool:
    """Let a product read heads, where these are columns for it alone."""
    found = _made_of_pieces(product)
    if found is None:
        return False
    chain, atoms = found
    node, leading, (first, *rest) = product.node, product.leading, joined(atoms.dims[-1])
    data, count = node.inputs[0], first[2]
    size = data.shape[-1] // count
    if not product.takes(product.rows, size):
        return False
    atoms.dims[-1:] = [[first], rest]
    value = follow(atoms.plan((*leading, count, size)), chain[0].inputs[0], data.name, _builder(node))
    _take_place(node, _einsum(module, product, size, value, product.rows, node.result.shape))
    erase_unread(chain)
    return True


def _made_of_pieces(product: _Product) -> tuple[list[Node], Atoms] | None:
    """What moves elements before a product, so that its columns are made of heads; and what becomes of the dims."""
    data = product.node.inputs[0]
    if data.sharding is not None or data.node is None or data.node.graph is not product.node.graph:
        return None
    chain = chain_of(data.node) if is_layout(data.node) else []
    atoms = atoms_of(chain) if chain else None
    pieces = [] if atoms is None else joined(atoms.dims[-1])
    if atoms is None or len(pieces) < 2 or not _divide_badly(pieces[0][2], product.parts(product.rows)):
        return None
    return chain, atoms


# -- both -----------------------------------------------------------------------------------------------------------


def _divide_badly(heads: int, parts: int) -> bool:
    """Whether there are more heads than devices, which do not divide them."""
    return heads > parts > 1 and heads % parts > 0


def _builder(node: Node) -> Builder:
    assert node.graph is not None
    return Builder(node.graph, {"": max(node.version, _OLDEST)}, before=node, like=node)


def _einsum(module: Module, product: _Product, size: int, data: Value, dim: int, shape: tuple[int, ...]) -> Value:
    """The product as an Einsum, with a weight of which one dim is apart."""
    weight, node = product.weight, product.node
    _give_heads(module, weight, dim, size)
    if product.dequantize is not None:
        weight = _dequantized(module, product.dequantize, dim, size)
    said = ByHeads(len(product.leading), are_columns=dim == product.columns, is_turned=product.rows == 1)
    type_ = TensorType(node.result.dtype, shape)
    name = node.result.name
    value = _builder(node).op("Einsum", [data, weight], {"equation": said.equation}, type=type_, name=name)
    if product.turn is not None:
        node.set_operand(1, weight)
        product.turn.erase()
    return value


def _dequantized(module: Module, node: Node, dim: int, size: int) -> Value:
    """What a node gives of a matrix that has a dim of heads now; its scales get one too."""
    axis, block = int_attribute(node, "axis", 1) % 2, int_attribute(node, "block_size", 1)
    for value in node.inputs[1:]:
        _give_heads(module, value, dim, size // block if axis == dim else size)
    node.set_attribute("axis", axis + (axis >= dim))
    result = node.result
    result.type = TensorType(result.dtype, node.inputs[0].shape)
    _name_apart(module, result)
    return result


def _give_heads(module: Module, value: Value, dim: int, size: int) -> None:
    """Let a dim of a constant be that of heads and that of their elements; its readers are about to be taken out."""
    assert value.data is not None
    value.data = _reshaped(value.data, dim, size)
    value.type, value.sharding = value.data.type, _with_heads(value.sharding, dim)
    said = module.annotated.get(value.name)
    if said is not None:
        module.annotated[value.name] = _said_of_heads(said, dim)
    if isinstance(value.data.base, ArrayTensor):
        _name_apart(module, value)


def _name_apart(module: Module, value: Value) -> None:
    """Give a value a name of its own: that of the model is of what nodes made, in its shape."""
    name = value.name
    value.source = None
    value.rename(f"{name}_by_heads")
    if name in module.annotated:
        module.annotated[value.name] = module.annotated.pop(name)
    if name in module.decisions:
        module.decisions[value.name] = module.decisions.pop(name)


def _said_of_heads(said: Annotation, dim: int) -> Annotation:
    """An annotation of a tensor of which a dim is taken apart."""
    spec = (*said.spec[: dim + 1], None, *said.spec[dim + 1 :])
    return replace(said, spec=spec, behind=said.behind and _said_of_heads(said.behind, dim))


def _reshaped(data: Tensor, dim: int, size: int) -> Tensor:
    """A tensor of which one dim is that of heads and that of their elements; a block of heads stays a block."""
    base, (start, stop) = data.base, data.region[dim]
    if any(number % size for number in (start, stop, base.shape[dim])):
        return data.reshaped(_apart(data.shape, dim, size))
    region = list(data.region)
    region[dim : dim + 1] = [(start // size, stop // size), (0, size)]
    return base.reshaped(_apart(base.shape, dim, size)).slice(region)


def _apart(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])


def _with_heads(sharding: Sharding | None, dim: int) -> Sharding | None:
    """The sharding of a tensor of which a dim is taken apart: its heads are sharded as it was."""
    if sharding is None:
        return None
    dims = sharding.dims
    return replace(sharding, dims=(*dims[: dim + 1], DimSharding(), *dims[dim + 1 :]))


def _take_place(node: Node, value: Value) -> None:
    """Let a value stand for the result of a node, under its name."""
    result = node.result
    value.memory, value.doc = result.memory, result.doc
    node.replace([value])
    value.rename(result.name)
