//! Runs the PTX that is shipped: the instructions that these kernels use, one thread after the
//! other, every access checked for bounds and alignment.

mod parse;

use std::collections::HashMap;

use kvbm_kernels::{FATBIN, ImageKind, Launch, THREADS, images};

use crate::memory::{Executor, Memory};
use parse::{Action, Compare, Entry, Function, Source, Space, Type};

/// Instructions of one thread after which it is taken to run for ever.
const MOST_STEPS: u64 = 5_000_000;

/// A machine that runs the shipped PTX.
pub(crate) struct Machine {
    ptx: String,
    entries: HashMap<&'static str, Entry>,
    /// Instructions executed so far.
    pub(crate) steps: u64,
}

impl Machine {
    /// Of the PTX in the fatbin.
    pub(crate) fn shipped() -> Self {
        let images = images(FATBIN).expect("the fatbin is readable");
        let image = images.iter().find(|image| image.kind == ImageKind::Ptx).expect("there is PTX");
        Self::of(String::from_utf8_lossy(image.code).into_owned())
    }

    pub(crate) fn of(ptx: String) -> Self {
        Self { ptx, entries: HashMap::new(), steps: 0 }
    }

    /// Its text.
    pub(crate) fn ptx(&self) -> &str {
        &self.ptx
    }
}

impl Executor for Machine {
    fn run(&mut self, launch: &Launch, memory: &mut Memory, reverse: bool) -> Result<(), String> {
        let name = launch.kernel.name();
        if !self.entries.contains_key(name) {
            self.entries.insert(name, parse::entry(&self.ptx, name)?);
        }
        let entry = &self.entries[name];
        if entry.argument != launch.params.len() {
            return Err(format!("the argument has {} bytes, not {}", entry.argument, launch.params.len()));
        }
        for block in 0..launch.grid {
            let block = if reverse { launch.grid - 1 - block } else { block };
            let shared = vec![0xCD; launch.shared_bytes as usize];
            let mut running = Block { entry, launch, index: block, memory, shared, steps: &mut self.steps };
            running.run(reverse).map_err(|error| format!("{name}, block {block}: {error}"))?;
        }
        Ok(())
    }
}

/// Where a thread stopped.
#[derive(PartialEq, Eq)]
enum Stop {
    Barrier,
    End,
}

struct Thread {
    index: u32,
    at: usize,
    registers: Vec<u64>,
}

/// A block of threads.
struct Block<'a> {
    entry: &'a Entry,
    launch: &'a Launch,
    index: u32,
    memory: &'a mut Memory,
    shared: Vec<u8>,
    steps: &'a mut u64,
}

impl Block<'_> {
    /// From barrier to barrier.
    fn run(&mut self, reverse: bool) -> Result<(), String> {
        let mut threads: Vec<Thread> = (0..THREADS)
            .map(|index| Thread { index, at: 0, registers: vec![0; self.entry.registers] })
            .collect();
        if reverse {
            threads.reverse();
        }
        loop {
            let mut ended = 0;
            for thread in &mut threads {
                let stop =
                    self.resume(thread).map_err(|error| format!("thread {}: {error}", thread.index))?;
                ended += usize::from(stop == Stop::End);
            }
            match ended {
                0 => {}
                all if all == threads.len() => return Ok(()),
                _ => return Err("some threads leave while others wait at a barrier".into()),
            }
        }
    }

    fn resume(&mut self, thread: &mut Thread) -> Result<Stop, String> {
        for _ in 0..MOST_STEPS {
            let instruction = self.entry.instructions.get(thread.at).ok_or("it runs off the end")?;
            thread.at += 1;
            *self.steps += 1;
            if instruction.guard.is_some_and(|(register, wanted)| (thread.registers[register] != 0) != wanted)
            {
                continue;
            }
            match &instruction.action {
                Action::Return => return Ok(Stop::End),
                Action::Barrier => return Ok(Stop::Barrier),
                Action::Branch(target) => thread.at = *target,
                action => self.step(thread, action).map_err(|error| format!("{action:?}: {error}"))?,
            }
        }
        Err("it does not end".into())
    }

    fn step(&mut self, thread: &mut Thread, action: &Action) -> Result<(), String> {
        match action {
            Action::Load { space, bytes, to, base, offset } => {
                let address = self.value(thread, *base).wrapping_add(*offset);
                let data = self.load(*space, address, bytes * to.len())?;
                for (register, word) in to.iter().zip(data.chunks_exact(*bytes)) {
                    thread.registers[*register] = little_endian(word);
                }
            }
            Action::Store { space, bytes, from, base, offset } => {
                let address = self.value(thread, *base).wrapping_add(*offset);
                let words = from.iter().map(|source| self.value(thread, *source).to_le_bytes());
                let data: Vec<u8> = words.flat_map(|word| word.into_iter().take(*bytes)).collect();
                self.writable(*space, address, data.len())?.copy_from_slice(&data);
            }
            Action::Compute { function, of, to, from } => {
                let values: Vec<u64> = from.iter().map(|source| self.value(thread, *source)).collect();
                thread.registers[*to] = compute(*function, *of, &values)?;
            }
            Action::Compare { compare, of, to, from } => {
                let [a, b] = from.map(|source| extended(self.value(thread, source), *of));
                let holds = match compare {
                    Compare::Equal => a == b,
                    Compare::NotEqual => a != b,
                    Compare::Less => a < b,
                    Compare::LessOrEqual => a <= b,
                    Compare::Greater => a > b,
                    Compare::GreaterOrEqual => a >= b,
                };
                thread.registers[*to] = u64::from(holds);
            }
            Action::Pack { to, from, bits } => {
                let parts = from.iter().rev().map(|source| truncated(self.value(thread, *source), *bits));
                thread.registers[*to] = parts.fold(0, |all, part| all << bits | part);
            }
            Action::Unpack { to, from, bits } => {
                let value = self.value(thread, *from);
                for (at, register) in to.iter().enumerate() {
                    thread.registers[*register] = truncated(value >> (at as u32 * bits), *bits);
                }
            }
            Action::Branch(_) | Action::Barrier | Action::Return => {}
        }
        Ok(())
    }

    fn value(&self, thread: &Thread, source: Source) -> u64 {
        match source {
            Source::Register(register) => thread.registers[register],
            Source::Immediate(value) => value,
            Source::Thread => u64::from(thread.index),
            Source::Block => u64::from(self.index),
            Source::Grid => u64::from(self.launch.grid),
        }
    }

    /// The bytes of one load; no more than a vector.
    fn load(&mut self, space: Space, address: u64, len: usize) -> Result<[u8; 16], String> {
        let bytes = match space {
            Space::Param => {
                let at = aligned(address, len)?;
                self.launch.params.get(at..at.saturating_add(len)).ok_or("it reads behind its argument")?
            }
            _ => self.writable(space, address, len)?,
        };
        let mut loaded = [0; 16];
        loaded.get_mut(..len).ok_or("a load of more than 16 bytes")?.copy_from_slice(bytes);
        Ok(loaded)
    }

    fn writable(&mut self, space: Space, address: u64, len: usize) -> Result<&mut [u8], String> {
        let at = aligned(address, len)?;
        let found = match space {
            Space::Global => self.memory.at(address, len),
            Space::Shared => self.shared.get_mut(at..at.saturating_add(len)),
            Space::Param => None,
        };
        found.ok_or_else(|| format!("{len} bytes at {address:#x} are outside of {space:?} memory"))
    }
}

fn aligned(address: u64, len: usize) -> Result<usize, String> {
    if !address.is_multiple_of(len as u64) {
        return Err(format!("{len} bytes at {address:#x} are not aligned"));
    }
    usize::try_from(address).map_err(|error| error.to_string())
}

fn compute(function: Function, of: Type, values: &[u64]) -> Result<u64, String> {
    let value = |at: usize| values.get(at).copied().unwrap_or_default();
    let wide = |at: usize| extended(value(at), of);
    let (a, b) = (wide(0), wide(1));
    let shift = value(1).min(u64::from(of.bits));
    let result = match function {
        Function::Move => a,
        Function::Convert { from } => extended(value(0), from),
        Function::Add => a + b,
        Function::Subtract => a - b,
        Function::Multiply => a.wrapping_mul(b),
        Function::MultiplyWide => return Ok(truncated((a * b) as u64, of.bits * 2)),
        Function::MultiplyAdd => a.wrapping_mul(b).wrapping_add(wide(2)),
        Function::Divide | Function::Remainder if b == 0 => return Err("division by zero".into()),
        Function::Divide => a / b,
        Function::Remainder => a % b,
        Function::Minimum => a.min(b),
        Function::Maximum => a.max(b),
        Function::And => a & b,
        Function::Or => a | b,
        Function::Xor => a ^ b,
        Function::Not => !a,
        Function::Negate => -a,
        Function::ShiftLeft => a << shift,
        Function::ShiftRight => a >> shift,
        Function::Select => wide(usize::from(value(2) == 0)),
        Function::Permute => i128::from(permuted(value(0), value(1), value(2))?),
    };
    Ok(truncated(result as u64, of.bits))
}

/// Bytes of two words, chosen by the four lowest digits of the selector.
fn permuted(a: u64, b: u64, selector: u64) -> Result<u64, String> {
    let both = truncated(a, 32) | truncated(b, 32) << 32;
    (0..4).try_fold(0, |all, at| match selector >> (4 * at) & 15 {
        byte @ 0..8 => Ok(all | (both >> (8 * byte) & 0xFF) << (8 * at)),
        _ => Err("prmt that spreads a sign".into()),
    })
}

fn truncated(value: u64, bits: u32) -> u64 {
    if bits >= 64 { value } else { value & ((1 << bits) - 1) }
}

/// The value of a type, with its sign.
fn extended(value: u64, of: Type) -> i128 {
    let value = i128::from(truncated(value, of.bits));
    let negative = of.signed && value >> (of.bits - 1) != 0;
    if negative { value - (1 << of.bits) } else { value }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
