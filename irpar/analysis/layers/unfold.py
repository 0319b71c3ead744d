"""A folded module in local view with all of its layers again, each as the one that stands for it.

folded    L0  L1  L2             L94  L95      L1, L2 and L94 came out alike: nodes, shardings, collectives, and what is
unfolded  L0  L1  L2  L3 ... L93 L94  L95      said of them; so L3 to L93 are as L2 is, under their own names
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from irpar.ir import Graph, Module, Node, Value
from irpar.ir.state_rules import states_of
from irpar.ops.bodies import is_numbered
from irpar.ops.collectives.numbering import numbers_in_order
from irpar.ops.facts import int_attribute

from .chain import MODEL, Chain
from .chain_names import Around
from .layer_copy import LayerCopy, Original
from .layer_log import LayerLog
from .layer_texts import LayerTexts
from .likeness import compare
from .numbered_names import NumberedNames, first_hidden
from .planned_program import Part, Place, PlannedProgram, Run
from .units import NotAlike


def unfold(folded: Module, whole: Module, chain: Chain) -> None:
    """Put the layers that were left out into the programs of a folded module, and into its log.

    Args:
        folded: from `folded_module`, in local view since.
        whole: what it was made of.
        chain: its layers.

    Raises:
        NotAlike: layers came out otherwise than their neighbours; the folded module may be half changed.
    """
    programs = [PlannedProgram(graph, chain, whole.graph.names.table) for graph in folded.graphs]
    for program in programs:
        compare(program)
    numbered = _numbered(programs, whole, chain)
    texts = LayerTexts(chain, programs[0].words, numbered)
    log = LayerLog(folded, whole, texts, programs[0])
    log.check()
    for program in programs:
        program.check_texts(numbered)
    for program in programs:
        for node in program.order:
            node.doc = numbered.text(node.doc)
        _Writer(program, texts).run(whole.graph)
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
        hidden = first_hidden(program.graph.names, known.had, own, numbered)
        if hidden is not None:
            raise NotAlike(f"new values are numbered after %{hidden}, which is gone: layers may have had it")
    return numbered


class _Writer:
    """Puts the layers that were left out into one program.

    Args:
        program: it.
        texts: of the layers.
    """

    def __init__(self, program: PlannedProgram, texts: LayerTexts) -> None:
        self.program = program
        self.chain = program.chain
        self.texts = texts
        self.like = program.parts[MODEL]
        self.beside = program.parts[MODEL + 1]
        self.copies: dict[int, LayerCopy] = {}

    def run(self, whole: Graph) -> None:
        program, chain = self.program, self.chain
        graph = program.graph
        lists = [graph.inputs, list(graph.constants)]
        runs = [list(program.runs(listed)) for listed in lists]
        program.called = {value: value.name for value in (*program.inner, *program.own)}
        over_all = {node: list(program.runs(list(node.inputs))) for node in program.over_all}
        results = program.results_of(MODEL)
        readers = self._readers()
        self._rename()
        self.copies = {layer: LayerCopy(program, layer) for layer in chain.left_out}
        own = {value: self.texts.value(value, program.called[value]) for value in program.own}
        for copy in self.copies.values():
            copy.add_own(own)
        for number, is_backward in enumerate(program.backward):
            before, behind = (self._read(given, number) for given in (program.before, program.behind))
            stop = (self.like if is_backward else self.beside)[number][0]
            originals = [Original(node, program, self.texts) for node in self.like[number]]
            for layer, copy in list(self.copies.items())[:: -1 if is_backward else 1]:
                copy.values.update({value: self._at(layer - 1, same) for value, same in before.items()})
                copy.values.update({value: self._at(layer + 1, same) for value, same in behind.items()})
                copy.insert(originals, stop)
        for node, index, layer, value in readers:
            node.set_operand(index, self._at(layer, value))
        graph.inputs, constants = (list(self._with_copies(*each)) for each in zip(lists, runs, strict=True))
        graph.constants = dict.fromkeys(constants)
        for index, value in enumerate(graph.inputs):
            value.index = index
        for node in program.over_all:
            node.set_operands([*self._with_copies(node.inputs, over_all[node])])
        self._add_results(whole, results)
        for layer, part in ((chain.kept[MODEL + 1], self.beside), (MODEL, self.like)):
            self._tell(part, chain.names.around(layer))

    def _read(self, given: Mapping[Value, Place], stretch: int) -> dict[Value, Value]:
        """What the layer reads there of what one beside it gives, and what stands at its place in the layer itself."""
        here = self.program.at
        read = dict.fromkeys(value for node in self.like[stretch] for value in node.inputs)
        return {value: here[given[value]] for value in read if value in given and given[value] in here}

    def _readers(self) -> list[tuple[Node, int, int, Value]]:
        """Nodes that are to read of a layer which comes beside theirs: which operand, that layer, and what is read."""
        chain, program = self.chain, self.program
        last, first = chain.left_out[-1], chain.left_out[0]
        behind = [(each, last, value) for each, value in _operands(self.beside) if value in program.inner]
        before = [
            (each, first, program.at[program.behind[value]])
            for each, value in _operands(self.like)
            if value in program.behind
        ]
        return [(*each, layer, value) for each, layer, value in (*behind, *before)]

    def _at(self, layer: int, value: Value) -> Value:
        """What a value of the layer that stands for others is in another one."""
        if layer == MODEL:
            return value
        if layer in self.copies:
            return self.copies[layer].values[value]
        return self.program.pairs[value]

    def _add_results(self, whole: Graph, results: Sequence[Value]) -> None:
        """Let what replaces state of the layers be results of the graph, where it is that with all layers."""
        chain, graph = self.chain, self.program.graph
        found = dict(zip(chain.kept_results(whole.output_count), graph.outputs, strict=True))
        for layer in chain.left_out:
            found.update(zip(chain.results[layer], (self._at(layer, value) for value in results), strict=True))
        graph.set_outputs([found[index] for index in range(whole.output_count)], whole.output_names)

    def _rename(self) -> None:
        """Let what is there already have the names that it has with all layers: of the next layer, and of numbers."""
        program, numbered, chain = self.program, self.texts.numbered, self.chain
        names = program.graph.names
        renamed: dict[Value, str] = {}
        for value in program.inner:
            if value.name not in program.steps:
                renamed[value] = program.words.text(value.name, chain.names.around(MODEL))
                renamed[program.pairs[value]] = program.words.text(
                    value.name, chain.names.around(chain.kept[MODEL + 1])
                )
        for name, value in names.table.items():
            if numbered.counts(name):
                renamed[value] = numbered.shifted(name)
        renamed = {value: name for value, name in renamed.items() if value.name != name}
        for value in renamed:
            names.release(value)
        for value, name in renamed.items():
            value.name = name
            names.claim(value)

    def _tell(self, part: Part, around: Around) -> None:
        """Let the nodes of a layer tell what those of the one that stands for others do, with its own names."""
        words = self.program.words
        for node, same in zip(_nodes(self.like), _nodes(part), strict=True):
            same.name, same.doc = words.text(node.name, around), words.text(node.doc, around)
            same.source, same.scope = words.optional(node.source, around), words.optional(node.scope, around)
            for value, other in zip(node.results, same.results, strict=True):
                other.source = words.optional(value.source, around)

    def _with_copies(self, listed: Sequence[Value], runs: Iterable[Run]) -> Iterator[Value]:
        """What is listed, and beside each run of what is of the layer that of each layer which is put in."""
        done = 0
        for start, stop, is_before in runs:
            run = listed[start:stop]
            yield from listed[done : start if is_before else stop]
            for layer in reversed(self.copies) if is_before else self.copies:
                yield from (self._at(layer, value) for value in run)
            yield from run if is_before else ()
            done = stop
        yield from listed[done:]


def _nodes(part: Part) -> Iterator[Node]:
    return itertools.chain.from_iterable(part)


def _operands(part: Part) -> Iterator[tuple[tuple[Node, int], Value]]:
    """What nodes read, and as which operand."""
    for node in _nodes(part):
        for index, value in enumerate(node.operands):
            if value is not None:
                yield (node, index), value
