//! Structured mutations: changes one value of a JSON line and leaves the line valid. Changing
//! random bytes hardly ever produces a line that can be parsed.

use serde_json::Value;

/// Limits of blocks, entries and integer types.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    255,
    511,
    512,
    4096,
    65_536,
    1 << 22,
    1 << 24,
    (64 << 20) + 1,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

const TEXTS: [&str; 12] = [
    "",
    ".",
    "..",
    "../x",
    "/x",
    "a/b",
    "@",
    "@p",
    "a\0b",
    "\u{fffd}",
    "claim",
    "9999-12-31T23:59:59.999999999Z",
];

/// A seeded generator of random numbers.
struct SeededRng(u64);

impl SeededRng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound.max(1)
    }
}

/// The input with one value of one of its first `lines` lines changed; none if that line is not
/// JSON.
pub fn change_a_value(input: &[u8], lines: usize, seed: u32) -> Option<Vec<u8>> {
    let mut rng = SeededRng(u64::from(seed));
    rng.below(2);
    let all: Vec<&[u8]> = input.split_inclusive(|byte| *byte == b'\n').collect();
    let at = rng.below(all.len().min(lines));
    let mut value: Value = serde_json::from_slice(all.get(at)?).ok()?;
    let inside = count(&value).saturating_sub(1);
    let mut nth = 1 + rng.below(inside);
    let (other, mut other_nth) = (value.clone(), 1 + rng.below(inside));
    let other = find(&other, &mut other_nth).cloned().unwrap_or(Value::Null);
    change(&mut value, &mut nth, &other, &mut rng);
    let mut out = all[..at].concat();
    serde_json::to_writer(&mut out, &value).ok()?;
    if all[at].ends_with(b"\n") {
        out.push(b'\n');
    }
    out.extend(all[at + 1..].concat());
    Some(out)
}

fn inner(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(fields) => Box::new(fields.values()),
        _ => Box::new(std::iter::empty()),
    }
}

fn count(value: &Value) -> usize {
    1 + inner(value).map(count).sum::<usize>()
}

/// The `nth` value inside, counted from the value itself.
fn find<'a>(value: &'a Value, nth: &mut usize) -> Option<&'a Value> {
    if *nth == 0 {
        return Some(value);
    }
    *nth -= 1;
    inner(value).find_map(|item| find(item, nth))
}

/// Changes the `nth` value inside; returns true when done.
fn change(value: &mut Value, nth: &mut usize, other: &Value, rng: &mut SeededRng) -> bool {
    if *nth == 0 {
        *value = changed(value, other, rng);
        return true;
    }
    *nth -= 1;
    match value {
        Value::Array(items) => items.iter_mut().any(|item| change(item, nth, other, rng)),
        Value::Object(fields) => fields
            .values_mut()
            .any(|field| change(field, nth, other, rng)),
        _ => false,
    }
}

fn changed(value: &Value, other: &Value, rng: &mut SeededRng) -> Value {
    match (rng.below(8), value) {
        (0, _) => other.clone(),
        (1, _) => Value::Null,
        (2, Value::Array(items)) => items.iter().chain(items.first()).cloned().collect(),
        (3, Value::Array(items)) => items.iter().skip(1).cloned().collect(),
        (4.., Value::Number(number)) if rng.below(2) == 0 => {
            let near = number.as_u64().unwrap_or(0);
            Value::from(if rng.below(2) == 0 {
                near.wrapping_add(1)
            } else {
                near.wrapping_sub(1)
            })
        }
        (2.., Value::Number(_)) => Value::from(NUMBERS[rng.below(NUMBERS.len())]),
        (2, Value::String(text)) => Value::from(text.repeat(2)),
        (_, Value::String(_)) => Value::from(TEXTS[rng.below(TEXTS.len())]),
        (2.., Value::Bool(yes)) => Value::from(!yes),
        (_, _) => Value::from(-1),
    }
}
