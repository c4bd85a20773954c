//! From text to instructions.

use std::collections::HashMap;

/// Where an operand's value comes from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Register(usize),
    Immediate(u64),
    Thread,
    Block,
    Grid,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    Shared,
    Param,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) bits: u32,
    pub(super) signed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compare {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Move,
    Convert { from: Type },
    Add,
    Subtract,
    Multiply,
    MultiplyWide,
    MultiplyAdd,
    Divide,
    Remainder,
    Minimum,
    Maximum,
    And,
    Or,
    Xor,
    Not,
    Negate,
    ShiftLeft,
    ShiftRight,
    Select,
    Permute,
}

#[derive(Debug, Clone)]
pub(super) enum Action {
    Load { space: Space, bytes: usize, to: Vec<usize>, base: Source, offset: u64 },
    Store { space: Space, bytes: usize, from: Vec<Source>, base: Source, offset: u64 },
    Compute { function: Function, of: Type, to: usize, from: Vec<Source> },
    Compare { compare: Compare, of: Type, to: usize, from: [Source; 2] },
    Pack { to: usize, from: Vec<Source>, bits: u32 },
    Unpack { to: Vec<usize>, from: Source, bits: u32 },
    Branch(usize),
    Barrier,
    Return,
}

#[derive(Debug, Clone)]
pub(super) struct Instruction {
    /// A predicate, and the value that it must have.
    pub(super) guard: Option<(usize, bool)>,
    pub(super) action: Action,
}

/// One kernel.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) instructions: Vec<Instruction>,
    pub(super) registers: usize,
    /// Bytes of its only argument.
    pub(super) argument: usize,
}

/// The kernel of this name.
pub(super) fn entry(ptx: &str, name: &str) -> Result<Entry, String> {
    let head = format!(".entry {name}(");
    let (_, text) = ptx.split_once(&head).ok_or_else(|| format!("no entry {name}"))?;
    let (params, body) = text.split_once("\n{").ok_or("no body")?;
    let (body, _) = body.split_once("\n}").ok_or("no end")?;
    let mut parser = Parser::default();
    let size = params.split_once('[').and_then(|(_, rest)| rest.split_once(']')).ok_or("no argument")?.0;
    parser.entry.argument = size.parse().map_err(|_| format!("argument of {size} bytes"))?;
    let lines = || body.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    let mut at = 0;
    for line in lines() {
        if let Some(label) = line.strip_suffix(':') {
            parser.labels.insert(label, at);
        } else if is_instruction(line) {
            at += 1;
        }
    }
    for line in lines().filter(|line| is_instruction(line)) {
        let instruction = parser.instruction(line).map_err(|error| format!("`{line}`: {error}"))?;
        parser.entry.instructions.push(instruction);
    }
    parser.entry.registers = parser.registers.len();
    Ok(parser.entry)
}

fn is_instruction(line: &str) -> bool {
    line.ends_with(';') && !line.starts_with('.')
}

#[derive(Default)]
struct Parser<'a> {
    registers: HashMap<&'a str, usize>,
    labels: HashMap<&'a str, usize>,
    entry: Entry,
}

impl<'a> Parser<'a> {
    fn instruction(&mut self, line: &'a str) -> Result<Instruction, String> {
        let mut rest = line.trim_end_matches(';').trim();
        let mut guard = None;
        if let Some(text) = rest.strip_prefix('@') {
            let (predicate, after) = text.split_once(char::is_whitespace).ok_or("a guard of nothing")?;
            let negated = predicate.starts_with('!');
            guard = Some((self.register(predicate.trim_start_matches('!')), !negated));
            rest = after.trim();
        }
        let (code, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let code: Vec<&str> = code.split('.').collect();
        let action = self.action(&code, &split(operands))?;
        Ok(Instruction { guard, action })
    }

    fn action(&mut self, code: &[&str], operands: &[&'a str]) -> Result<Action, String> {
        let of = code.iter().rev().find_map(|part| type_of(part));
        let of = || of.ok_or("no type");
        let operand = |at: usize| operands.get(at).copied().ok_or("an operand is missing");
        Ok(match code[0] {
            "ret" => Action::Return,
            "bar" => Action::Barrier,
            "bra" => Action::Branch(*self.labels.get(operand(0)?).ok_or("no such label")?),
            "ld" => {
                let (base, offset) = self.address(operand(1)?)?;
                let to: Vec<_> = list(operand(0)?).map(|name| self.register(name)).collect();
                check_vector(code, to.len())?;
                Action::Load { space: space(code), bytes: of()?.bits as usize / 8, to, base, offset }
            }
            "st" => {
                let (base, offset) = self.address(operand(0)?)?;
                let from: Vec<_> =
                    list(operand(1)?).map(|text| self.source(text)).collect::<Result<_, _>>()?;
                check_vector(code, from.len())?;
                Action::Store { space: space(code), bytes: of()?.bits as usize / 8, from, base, offset }
            }
            "setp" => {
                let from = [self.source(operand(1)?)?, self.source(operand(2)?)?];
                let compare = comparison(code[1])?;
                Action::Compare { compare, of: of()?, to: self.register(operand(0)?), from }
            }
            "mov" if operand(1)?.starts_with('{') => {
                let from: Vec<_> =
                    list(operand(1)?).map(|text| self.source(text)).collect::<Result<_, _>>()?;
                let bits = of()?.bits / from.len() as u32;
                Action::Pack { to: self.register(operand(0)?), from, bits }
            }
            "mov" if operand(0)?.starts_with('{') => {
                let to: Vec<_> = list(operand(0)?).map(|name| self.register(name)).collect();
                let bits = of()?.bits / to.len() as u32;
                Action::Unpack { from: self.source(operand(1)?)?, to, bits }
            }
            _ => {
                let function = function(code)?;
                let to = self.register(operand(0)?);
                let from = operands[1..].iter().map(|text| self.source(text)).collect::<Result<_, _>>()?;
                // A conversion names what it makes first, then what it takes.
                let of = if code[0] == "cvt" { type_of(code[1]).ok_or("no type")? } else { of()? };
                Action::Compute { function, of, to, from }
            }
        })
    }

    fn register(&mut self, name: &'a str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name).or_insert(next)
    }

    fn source(&mut self, text: &'a str) -> Result<Source, String> {
        Ok(match text {
            "%tid.x" => Source::Thread,
            "%ctaid.x" => Source::Block,
            "%nctaid.x" => Source::Grid,
            _ if text.starts_with('%') && text.contains('.') => {
                return Err(format!("no such register: {text}"));
            }
            _ if text.starts_with('%') => Source::Register(self.register(text)),
            // The only variable in shared memory, and the only argument: both begin at 0 of their
            // space.
            _ if text == "kvbm_shared" || text.ends_with("_param_0") => Source::Immediate(0),
            _ => Source::Immediate(immediate(text)?),
        })
    }

    fn address(&mut self, text: &'a str) -> Result<(Source, u64), String> {
        let inner = text.trim_start_matches('[').trim_end_matches(']');
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        Ok((self.source(base)?, immediate(offset)?))
    }
}

/// Splits at the commas outside of braces and brackets.
fn split(operands: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in operands.char_indices() {
        match letter {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(operands[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(operands[begin..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.trim_start_matches('{').trim_end_matches('}').split(',').map(str::trim)
}

fn check_vector(code: &[&str], registers: usize) -> Result<(), String> {
    let said = code.iter().find_map(|part| part.strip_prefix('v')?.parse().ok()).unwrap_or(1);
    if said == registers { Ok(()) } else { Err(format!("{registers} registers for a vector of {said}")) }
}

fn immediate(text: &str) -> Result<u64, String> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let value = value.map_err(|_| format!("not a number: {text}"))?;
    Ok(if negative { value.wrapping_neg() } else { value })
}

fn type_of(part: &str) -> Option<Type> {
    if part == "pred" {
        return Some(Type { bits: 1, signed: false });
    }
    let signed = part.starts_with('s');
    let bits = part.strip_prefix(['u', 's', 'b'])?.parse().ok()?;
    [8, 16, 32, 64].contains(&bits).then_some(Type { bits, signed })
}

fn space(code: &[&str]) -> Space {
    match code[1] {
        "shared" => Space::Shared,
        "param" => Space::Param,
        _ => Space::Global,
    }
}

fn comparison(text: &str) -> Result<Compare, String> {
    Ok(match text {
        "eq" => Compare::Equal,
        "ne" => Compare::NotEqual,
        "lt" => Compare::Less,
        "le" => Compare::LessOrEqual,
        "gt" => Compare::Greater,
        "ge" => Compare::GreaterOrEqual,
        _ => return Err(format!("no such comparison: {text}")),
    })
}

fn function(code: &[&str]) -> Result<Function, String> {
    Ok(match (code[0], code.get(1).copied().unwrap_or_default()) {
        // Addresses are the same in all spaces here: only global ones are converted.
        ("mov", _) | ("cvta", "to") => Function::Move,
        ("cvt", _) => {
            Function::Convert { from: code.last().and_then(|part| type_of(part)).ok_or("no type")? }
        }
        ("add", _) => Function::Add,
        ("sub", _) => Function::Subtract,
        ("mul", "lo") => Function::Multiply,
        ("mul", "wide") => Function::MultiplyWide,
        ("mad", "lo") => Function::MultiplyAdd,
        ("div", _) => Function::Divide,
        ("rem", _) => Function::Remainder,
        ("min", _) => Function::Minimum,
        ("max", _) => Function::Maximum,
        ("and", _) => Function::And,
        ("or", _) => Function::Or,
        ("xor", _) => Function::Xor,
        ("not", _) => Function::Not,
        ("neg", _) => Function::Negate,
        ("shl", _) => Function::ShiftLeft,
        ("shr", _) => Function::ShiftRight,
        ("selp", _) => Function::Select,
        ("prmt", _) => Function::Permute,
        _ => return Err(format!("no such instruction: {}", code.join("."))),
    })
}
