"""A folded module in local view with all of its layers again, each as the one that stands for it.

folded    L0  L1  L2             L94  L95      L1, L2 and L94 came out alike: nodes, shardings, collectives, and what is
unfolded  L0  L1  L2  L3 ... L93 L94  L95      said of them; so L3 to L93 are as L2 is, under their own names
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from irpar.ir import Graph, Module, Node, Value
from irpar.ir.state_rules import states_of
from irpar.ops.bodies import is_numbered
from irpar.ops.collectives.numbering import numbers_in_order
from irpar.ops.facts import int_attribute

from .chain import MODEL, Chain, NotAlike
from .chain_names import Around
from .layer_copy import LayerCopy
from .layer_log import LayerLog
from .likeness import compare
from .numbered_names import NumberedNames, first_hidden
from .planned_program import PlannedProgram, places_of


def unfold(folded: Module, whole: Module, chain: Chain) -> None:
    """Put the layers that were left out into the programs of a folded module, and into its log.

    Args:
        folded: from `folded_module`, in local view since.
        whole: what it was made of.
        chain: its layers.

    Raises:
        NotAlike: layers came out otherwise than their neighbours; the folded module may be half changed.
    """
    programs = [PlannedProgram(graph, chain) for graph in folded.graphs]
    for program in programs:
        compare(program)
    numbered = _numbered(programs, whole, chain)
    log = LayerLog(folded, whole, numbered, programs[0])
    log.check()
    for program in programs:
        program.check_texts(numbered)
    for program in programs:
        _Writer(program, numbered).run()
        _keep_states(program.graph, whole.graph)
    log.write()
    folded.repeats = {}
    _number(folded.graphs)


def _keep_states(graph: Graph, whole: Graph) -> None:
    """Let inputs that are state in the graph of all layers be that here, in the same order."""
    named = {value.name: value for value in graph.inputs}
    graph.states = states_of(whole, {value: named[value.name] for value in whole.states if value.name in named})


def _number(graphs: Sequence[Graph]) -> None:
    """Number collectives in order, where each has its number among the attributes."""
    numbers = numbers_in_order(graphs)
    if numbers is None:
        raise NotAlike("programs have their collectives in no common order")
    for node in (node for graph in graphs for node in graph if is_numbered(node)):
        node.attributes["id"] = numbers[int_attribute(node, "id")]


def _numbered(programs: Sequence[PlannedProgram], whole: Module, chain: Chain) -> NumberedNames:
    """The names that count on: the same in all programs.

    Raises:
        NotAlike: they are not, or have no pattern.
    """
    steps = programs[0].steps
    numbered = NumberedNames(steps, len(chain.left_out))
    names = {name for program in programs for name in program.graph.names.table}
    if not numbered.is_regular or any(program.steps != steps for program in programs):
        raise NotAlike("new names count on otherwise from layer to layer")
    known = whole.graph.names
    taken = next((name for name in numbered.given(names) if known.had(name)), None)
    if taken is not None:
        raise NotAlike(f"%{taken} has a name that would be given to another value")
    own = {name for layer in chain.kept for name in chain.names.rows[layer]}
    for program in programs:
        hidden = first_hidden(program.graph.names, known.had, own)
        if hidden is not None:
            raise NotAlike(f"new values are numbered after %{hidden}, which is gone: layers may have had it")
    return numbered


class _Writer:
    """Puts the layers that were left out into one program.

    Args:
        program: it.
        numbered: names that count on.
    """

    def __init__(self, program: PlannedProgram, numbered: NumberedNames) -> None:
        self.program = program
        self.chain = program.chain
        self.numbered = numbered
        self.beside = program.parts[MODEL + 1]

    def run(self) -> None:
        program, chain = self.program, self.chain
        graph = program.graph
        runs = program.runs(graph.inputs) | program.runs(graph.constants)
        program.called = {value: value.name for value in (*program.inner, *program.own)}
        self._rename()
        readers = [
            (node, index, value)
            for node in self.beside
            for index, value in enumerate(node.operands)
            if value is not None and value in program.inner
        ]
        made: dict[Value, list[Value]] = {value: [] for value in program.own}
        given = {place: value for value, place in program.inner.items()}
        for layer in chain.left_out:
            copy = LayerCopy(program, layer, self.numbered)
            values = copy.own()
            for value, its in values.items():
                made[value].append(its)
            values.update({value: given[place] for value, place in program.before.items() if place in given})
            copy.nodes(values, self.beside[0])
            given = {place: values[value] for value, place in program.inner.items()}
        for node, index, value in readers:
            node.set_operand(index, given[program.inner[value]])
        graph.constants = dict.fromkeys(_with_copies(graph.constants, runs, made))
        graph.inputs = list(_with_copies(graph.inputs, runs, made))
        for index, value in enumerate(graph.inputs):
            value.index = index
        for layer, part in ((chain.kept[MODEL + 1], self.beside), (MODEL, program.parts[MODEL])):
            self._tell(part, chain.names.around(layer))

    def _rename(self) -> None:
        """Let what comes behind the layers that are put in have the names that it has with them."""
        program, numbered = self.program, self.numbered
        names = program.graph.names
        around = self.chain.names.around(self.chain.kept[MODEL + 1])
        renamed: dict[Value, str] = {}
        for value, same in zip(program.inner, places_of(self.beside), strict=True):
            if value.name not in program.steps:
                renamed[same] = program.words.text(value.name, around)
        for name, value in names.table.items():
            if numbered.counts(name):
                renamed[value] = numbered.shifted(name)
        renamed = {value: name for value, name in renamed.items() if value.name != name}
        for value in renamed:
            names.release(value)
        for value, name in renamed.items():
            value.name = name
            names.claim(value)

    def _tell(self, part: Sequence[Node], around: Around) -> None:
        """Let the nodes of a layer tell what those of the one that stands for others do, with its own names."""
        words = self.program.words
        for node, same in zip(self.program.parts[MODEL], part, strict=True):
            same.doc = words.text(node.doc, around)
            for value, other in zip(node.results, same.results, strict=True):
                other.source = words.optional(value.source, around)


def _with_copies(
    listed: Iterable[Value], runs: Mapping[Value, list[Value]], made: Mapping[Value, list[Value]]
) -> Iterator[Value]:
    """What is listed, and behind each run of what is a layer's own that of each layer which is put in."""
    for value in listed:
        yield value
        for its in zip(*(made[one] for one in runs.get(value, ())), strict=True):
            yield from its
