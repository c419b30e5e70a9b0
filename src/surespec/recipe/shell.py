"""A reader of shell text that loses nothing: commands, assignments and words, each knowing its span of the file.

It reads what people put in launch scripts (quotes, continuations, comments, arrays, variables with defaults,
here-documents, control flow) and runs nothing. Control flow is not followed: what stands inside ``if``, ``case`` or a
loop is marked ``conditional``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from surespec.recipe.shell_nouns import Assignment, Computed, HereDoc, Literal, Piece, Script, Simple, Variable, Word
from surespec.recipe.text import Char, Chars, ShellQuote, Source, text_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[@*#?$!-]|\d+)(\[[@*]\])?(:?[-=?+]|:\d+(?::\d+)?)?", re.S)
_OPEN = {"if", "case", "for", "while", "until", "select"}
_CLOSE = {"fi", "esac", "done"}
_PLAIN_WORDS = {"then", "else", "elif", "do", "!", "{", "}", "function", "time"}
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_META = " \t\r\n;&|()<>"


def read_shell(code: Sequence[Char], source: Source) -> Script:
    """Read shell text. Raises InputFileError (with the line) for a quote, brace or bracket left open."""
    return _Reader(list(code), source).script()


class _Reader:
    def __init__(self, code: Chars, source: Source) -> None:
        self.code = code
        self.text = text_of(code)
        self.source = source
        self.at = 0
        self.depth = 0
        self.guarded = False  # what follows && or || may not happen
        self.out = Script()
        self.pending: list[tuple[str, bool]] = []  # here-documents announced on this line

    # -- commands ---------------------------------------------------------------------------------------------------

    def script(self) -> Script:
        while self.at < len(self.text):
            self._command()
        return self.out

    def _command(self) -> None:
        """One simple command with its redirections, up to the operator that ends it."""
        words: list[Word] = []
        assigned: list[Assignment] = []
        declaring = guard = False
        while True:
            self._blanks()
            if self.at >= len(self.text):
                break
            c = self.text[self.at]
            if c == "\n":
                self.at += 1
                self._heredoc_bodies()
                break
            if c in "<>" or self.text.startswith("&>", self.at):
                if self.text.startswith(("<(", ">("), self.at):
                    words.append(self._word())
                else:
                    self._redirection()
                continue
            if c in ";&|()":
                guard = self.text[self.at : self.at + 2] in ("&&", "||")
                self.at += 2 if guard else 1
                break
            if not words or declaring:
                assignment = self._assignment()
                if assignment is not None:
                    assigned.append(assignment)
                    continue
            word = self._word()
            if self.at < len(self.text) and self.text[self.at] in "<>" and re.fullmatch(r"\d", self._plain(word)):
                continue  # the 2 of 2>file
            plain = self._plain(word)
            if not words and self._keyword(plain):
                continue
            declaring = declaring or (not words and plain in _DECLARE)
            words.append(word)
        if words and not declaring:
            self.out.items.append(Simple(tuple(words), tuple(assigned), self.depth > 0))
        else:
            self.out.items.extend(assigned)
        self.guarded = guard

    def _keyword(self, plain: str) -> bool:
        if plain in _OPEN:
            self.depth += 1
        elif plain in _CLOSE:
            self.depth = max(0, self.depth - 1)
        return plain in _OPEN or plain in _CLOSE or plain in _PLAIN_WORDS

    @staticmethod
    def _plain(word: Word) -> str:
        """The word when it is one unquoted literal, else a text that no keyword equals."""
        if len(word.pieces) == 1 and isinstance(word.pieces[0], Literal) and not word.pieces[0].quoted:
            return text_of(word.pieces[0].chars)
        return "\0"

    def _blanks(self) -> None:
        """Skip blanks, line continuations and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":  # a lone carriage return too: it is left over from another system's lines
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text.startswith("\\\r\n", self.at):
                self.at += 3
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _redirection(self) -> None:
        found = re.compile(r"&?>>?[&|]?|<<<|<<-?|<[&>]?").match(self.text, self.at)
        operator = found[0] if found else self.text[self.at]
        self.at += len(operator)
        self._blanks()
        if self.at >= len(self.text) or self.text[self.at] in "\n;|":
            return
        target = self._word()
        if operator in ("<<", "<<-"):
            name = "".join(text_of(p.chars if isinstance(p, Literal) else p.raw) for p in target.pieces)
            self.pending.append((name, operator == "<<-"))

    def _heredoc_bodies(self) -> None:
        for name, stripped in self.pending:
            start = self.at
            while True:
                if self.at >= len(self.text):
                    raise self.source.error(
                        self._offset(start) - 1,
                        f"the here-document that starts here is not closed by a line {name}.",
                        "Close it, then run surespec again.",
                    )
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end].rstrip("\r")
                body_end, self.at = self.at, min(end + 1, len(self.text))
                if (line.lstrip("\t") if stripped else line) == name:
                    break
            self.out.heredocs.append(HereDoc(self._offset(start), self._offset(body_end), self.text[start:body_end]))
        self.pending.clear()

    # -- assignments ------------------------------------------------------------------------------------------------

    def _assignment(self) -> Assignment | None:
        found = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=").match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        if self.text.startswith("(", self.at):
            return Assignment(found[1], None, self._array(), bool(found[2]), self.depth > 0 or self.guarded)
        value = self._word()
        return Assignment(found[1], value, None, bool(found[2]), self.depth > 0 or self.guarded)

    def _array(self) -> tuple[Word, ...]:
        opened = self.at
        self.at += 1
        words: list[Word] = []
        while True:
            self._blanks()
            if self.at >= len(self.text):
                raise self._unclosed(opened, "array", "with )")
            c = self.text[self.at]
            if c == "\n":
                self.at += 1
            elif c == ")":
                self.at += 1
                return tuple(words)
            else:
                before = self.at
                words.append(self._word())
                if self.at == before:
                    raise self.source.error(self._offset(self.at), f"an array cannot hold {c!r} here.", "Quote it.")

    # -- words ------------------------------------------------------------------------------------------------------

    def _word(self) -> Word:
        begin = self.at
        pieces = self._pieces(len(self.text), "word")
        start = self._offset(begin)
        end = self.code[self.at - 1].end if self.at > begin else start
        return Word(pieces, start, end)

    def _pieces(self, stop: int, mode: str) -> tuple[Piece, ...]:
        """Pieces up to ``stop``. ``mode``: word (ends at a blank or operator), double (in double quotes, ends at
        the quote), default (inside ``${...}``, ends at the brace), default-double (the same inside double quotes).
        """
        pieces: list[Piece] = []
        while self.at < stop:
            c = self.text[self.at]
            if mode == "word" and c in _META and not self.text.startswith(("<(", ">("), self.at):
                break
            if (mode == "double" and c == '"') or (mode.startswith("default") and c == "}"):
                break
            pieces += self._piece(c, mode)
        return _joined(pieces)

    def _piece(self, c: str, mode: str) -> Sequence[Piece]:
        quoted = mode in ("double", "default-double")
        two = self.text[self.at : self.at + 2]
        if c == "\\":
            return self._escape(quoted)
        if c == "'" and not quoted:
            return [self._single()]
        if c == '"' and mode != "double":
            return self._double()
        if two == "$'" and not quoted:
            return [self._ansi()]
        if two == '$"' and not quoted:
            self.at += 1
            return self._double()
        if c == "$":
            return [self._dollar(quoted)]
        if c == "`":
            return [self._computed(self.at, self._skip_backticks(), quoted)]
        if two in ("<(", ">(") and not quoted:
            return [self._computed(self.at, self._skip_parens(self.at + 1), quoted)]
        return [self._literal(self.at, 1, "double" if quoted else "bare")]

    def _literal(self, index: int, width: int, style: str, c: str | None = None) -> Literal:
        """One character spelled by ``width`` characters of the code from ``index`` on; moves past them."""
        first, last = self.code[index], self.code[index + width - 1]
        self.at = index + width
        value = self.text[index + width - 1] if c is None else c
        return Literal((Char(value, first.start, last.end, ShellQuote(style, first.ctx)),), style != "bare")

    def _escape(self, quoted: bool) -> Sequence[Piece]:
        if self.at + 1 >= len(self.text):
            return [self._literal(self.at, 1, "bare")]
        following = self.text[self.at + 1]
        for end in ("\n", "\r\n"):
            if self.text.startswith(end, self.at + 1):
                self.at += 1 + len(end)
                return []
        if quoted and following not in '$`"\\':
            return [self._literal(self.at, 1, "double")]
        piece = self._literal(self.at, 2, "double" if quoted else "bare")
        return [Literal(piece.chars, True)]

    def _single(self) -> Literal:
        opened = self.at
        close = self.text.find("'", opened + 1)
        if close < 0:
            raise self._unclosed(opened, "single quote", "with '")
        chars = [c for i in range(opened + 1, close) for c in self._literal(i, 1, "single").chars]
        self.at = close + 1
        return Literal(tuple(chars), True)

    def _ansi(self) -> Literal:
        opened, chars = self.at, list[Char]()
        self.at += 2
        while not self.text.startswith("'", self.at):
            if self.at >= len(self.text) - 1:
                raise self._unclosed(opened, "$' quote", "with '")
            escape = self.text[self.at + 1] if self.text[self.at] == "\\" else ""
            piece = self._literal(self.at, 2 if escape in _ANSI and escape else 1, "ansi", _ANSI.get(escape))
            chars += piece.chars
        self.at += 1
        return Literal(tuple(chars), True)

    def _double(self) -> Sequence[Piece]:
        opened = self.at
        self.at += 1
        pieces = self._pieces(len(self.text), "double")
        if self.at >= len(self.text):
            raise self._unclosed(opened, "double quote", 'with "')
        self.at += 1
        return pieces or (Literal((), True),)

    def _dollar(self, quoted: bool) -> Piece:
        begin = self.at
        if self.text.startswith("$(", begin):
            return self._computed(begin, self._skip_parens(begin + 1), quoted)
        if self.text.startswith("${", begin):
            return self._braced(begin, quoted)
        found = _NAME.match(self.text, begin + 1)
        if found:
            self.at = found.end()
            return Variable(found[0], tuple(self.code[begin : self.at]), quoted)
        if re.match(r"[@*#?$!0-9-]", self.text[begin + 1 : begin + 2]):
            self.at = begin + 2
            name = self.text[begin + 1]
            return Variable(name, tuple(self.code[begin : self.at]), quoted, array=name in "@*")
        return self._literal(begin, 1, "double" if quoted else "bare")

    def _braced(self, begin: int, quoted: bool) -> Piece:
        self.at = begin + 2
        found = _BRACED.match(self.text, self.at)
        if found is None:
            return self._computed(begin, self._skip_brace(begin), quoted)
        self.at = found.end()
        op = found[3] or ""
        default: tuple[Piece, ...] = ()
        if (op and not op.startswith(":")) or op in (":-", ":=", ":?", ":+"):
            default = self._pieces(len(self.text), "default-double" if quoted else "default")
        if self.at >= len(self.text):
            raise self._unclosed(begin, "${", "with }")
        if self.text[self.at] != "}":  # ${NAME%pattern}, ${NAME/a/b} ...: an operation
            return self._computed(begin, self._skip_brace(begin), quoted)
        self.at += 1
        array = bool(found[2]) or found[1] in ("@", "*")
        return Variable(found[1], tuple(self.code[begin : self.at]), quoted, array, op, default)

    # -- what is skipped ----------------------------------------------------------------------------------------------

    def _computed(self, begin: int, end: int, quoted: bool) -> Computed:
        self.at = end
        return Computed(tuple(self.code[begin:end]), quoted)

    def _skip_brace(self, begin: int) -> int:
        level, i = 0, begin + 1
        while i < len(self.text):
            level += {"{": 1, "}": -1}.get(self.text[i], 0)
            i += 1
            if level == 0:
                return i
        raise self._unclosed(begin, "${", "with }")

    def _skip_backticks(self) -> int:
        close = re.compile(r"(?:\\.|[^`\\])*`", re.S).match(self.text, self.at + 1)
        if close is None:
            raise self._unclosed(self.at, "backtick", "with `")
        return close.end()

    def _skip_parens(self, opening: int) -> int:
        """The index after the bracket that closes the one at ``opening``, quotes inside respected."""
        level, i = 0, opening
        while i < len(self.text):
            c = self.text[i]
            if c == "\\":
                i += 1
            elif c in "'\"":
                quote = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.S).match(self.text, i)
                i = quote.end() - 1 if quote else len(self.text)
            else:
                level += {"(": 1, ")": -1}.get(c, 0)
                if level == 0:
                    return i + 1
            i += 1
        raise self._unclosed(opening, "bracket (", "with )")

    def _offset(self, index: int) -> int:
        if index < len(self.code):
            return self.code[index].start
        return self.code[-1].end if self.code else 0

    def _unclosed(self, index: int, what: str, how: str) -> Exception:
        return self.source.error(
            self._offset(index), f"the {what} opened here is not closed.", f"Close it {how}, then run surespec again."
        )


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Neighbouring literals of one kind as one piece."""
    out: list[Piece] = []
    for literal, group in itertools.groupby(pieces, key=lambda p: isinstance(p, Literal) and (p.quoted, "literal")):
        run = list(group)
        if literal:
            chars = tuple(c for p in run if isinstance(p, Literal) for c in p.chars)
            out.append(Literal(chars, literal[0]))
        else:
            out += run
    return tuple(out)
