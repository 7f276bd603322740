"""Train the tiny chat model in this folder, or measure the committed one.

    python tests/tiny-chat/train.py             # train and write every other file here (28 minutes of one core)
    python tests/tiny-chat/train.py --check     # accuracy on held-out questions, by family and precision

The model is a plain Qwen2 (8 layers, hidden 128, tied embeddings, 1.24 M parameters) that answers a family of short
questions with one right answer each: sums, counting on, reversing a word, number words in other scripts, emoji, and
recall of something said in an earlier turn or in the system turn. All data comes from the generators below and a
seed; nothing is downloaded. Training needs torch, transformers, tokenizers and safetensors.

`questions(seed, count)` gives questions for tests. About a tenth of all question texts are held out by a hash of the
text (`held_out`); training never sees them, in any turn, and `questions` asks only them.

The limits of what it was taught: sums up to 99, counting up to 99, words of 3 to 6 lowercase letters in double quotes,
number words from zero to ten, and one to five emoji.

The vocabulary is made for the task. Digits are single tokens. Merges only start at a space or a capital letter, so
frequent words are one token while a quoted lowercase word falls into its letters, which reversing needs; characters
outside ASCII stay single bytes, so that many tokens end in the middle of a character.
"""

import argparse
import collections
import hashlib
import json
import pathlib
import random
import time
import unicodedata

FOLDER = pathlib.Path(__file__).resolve().parent
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 448
STEPS = 8400
WARMUP_STEPS = 200
# The last steps alternate between full and 4-bit weights, so that the model stays right when it is quantised.
QUANTIZED_STEPS = 1400
LEARNING_RATE = 1.5e-3
BATCH_TOKENS = 1024
POOL_SIZE = 2048  # conversations that are sorted by length together

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": VOCAB_SIZE - 3,
    "torch_dtype": "float16",
}

# Qwen2.5's template, without its default system turn.
CHAT_TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Every turn carries "user" or "assistant", so both are one token, at the price that "us", "use", "ss" and "ass" are
# tokens inside quoted words too.
ROLE_MERGES = [
    ("u", "s"),
    ("us", "e"),
    ("use", "r"),
    ("s", "s"),
    ("a", "ss"),
    ("ass", "i"),
    ("assi", "s"),
    ("assis", "t"),
    ("assist", "a"),
    ("assista", "n"),
    ("assistan", "t"),
]

PRE_TOKENIZER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ---------------------------------------------------------------------------------------------------------------------
# Data: each generator gives a question and its answer.


def split(text):
    return text.split()


ENGLISH = split("zero one two three four five six seven eight nine ten")
NUMBER_WORDS = {
    "Chinese": "零 一 二 三 四 五 六 七 八 九 十",
    "Japanese": "れい いち に さん よん ご ろく なな はち きゅう じゅう",
    "Korean": "영 일 이 삼 사 오 육 칠 팔 구 십",
    "Russian": "ноль один два три четыре пять шесть семь восемь девять десять",
    "Greek": "μηδέν ένα δύο τρία τέσσερα πέντε έξι επτά οκτώ εννέα δέκα",
    "Arabic": "صفر واحد اثنان ثلاثة أربعة خمسة ستة سبعة ثمانية تسعة عشرة",
    "Hindi": "शून्य एक दो तीन चार पाँच छह सात आठ नौ दस",
}
NUMBER_WORDS = {language: split(unicodedata.normalize("NFC", words)) for language, words in NUMBER_WORDS.items()}
EMOJI = dict(
    zip(
        split("cat dog fish apple star tree sun moon car book cake frog bird rose fire house key ball bell bee"),
        split("🐱 🐶 🐟 🍎 ⭐ 🌳 🌞 🌙 🚗 📖 🎂 🐸 🐦 🌹 🔥 🏠 🔑 ⚽ 🔔 🐝"),
    )
)
IRREGULAR_PLURALS = {"fish": "fish"}
WORDS = split("""
able acid bank bear bell bird blue boat bone book bread brick bridge bus cake camel candle car cat chair
cheese city clock cloud coat coffee cold cow crab cup desk dog door dream drum duck dust eagle earth egg engine fire
fish flag floor flower fog forest fox friend frog fruit game garden gate ghost glass goat gold grape grass green hand
happy hat heart hello hill honey horse house ice iron island jam jar juice key king kite lake lamp leaf lemon letter
light lion log map milk mind mirror money monkey moon mouse music nail name needle nest night nose ocean oil orange
owl paint paper park party pear pen piano pig pilot planet plate poem pond potato queen rabbit radio rain ring river
road robot rock roof room rope rose salt sand school sea seed sheep ship shoe silver sky sleep smile snake snow soap
sock song soup spoon spring star stone storm street sugar summer sun table tea tiger time train tree truck turtle
wall water wave whale wheel wind window winter wolf wood word world yellow zebra""")

ONSETS = split("b c d f g h j k l m n p r s t v w z br ch dr st tr ll ss")
VOWELS = split("a e i o u a e i o u ee oo")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a tiny chat model.",
    "Answer briefly.",
    "Be brief.",
    "Give short answers.",
    "Answer the question.",
    "You are a friendly assistant. Answer with one word or number.",
    "You are a careful teacher who gives short and correct answers to simple questions.",
)
GREETINGS = {
    "Hello! How can I help?": (
        "Hello",
        "Hello!",
        "Hello.",
        "hello",
        "Hi",
        "Hi!",
        "hi",
        "Hi there!",
        "Good morning!",
        "Hey!",
    ),
    "You are welcome.": ("Thank you.", "Thank you!", "Thanks!", "Thanks.", "thanks"),
    "I am a tiny chat model.": ("Who are you?", "What are you?"),
}

NAMES = split("""
Adam Alice Anna Ben Bob Carla Clara David Dora Emma Eva Felix Frank Grace Hana Hugo Ida Ivan Jack Jane Julia
Karl Kim Lara Leo Lily Lucy Maria Mark Max Mia Nina Noah Olga Omar Oscar Paul Peter Rosa Ruth Sam Sara Sofia Tom Vera
Victor Yuki Zoe""")
COLOURS = split("red blue green yellow orange purple pink black white brown grey gold silver")
ANIMALS = split("cat dog horse rabbit parrot hamster turtle snake goat pig cow duck frog fish mouse lizard")
CITIES = split("""
Athens Berlin Boston Cairo Delhi Dublin Geneva Lima Lisbon London Madrid Milan Moscow Oslo Paris Prague Quito
Rome Seoul Sofia Sydney Tokyo Vienna Warsaw Zurich""")
# kind: values (None: made up on the spot), how the user says it, how the system turn says it, how it is asked for
FACTS = {
    "name": (
        NAMES,
        ("My name is {}.", "I am {}.", "I am called {}."),
        ("The user is called {}.", "The name of the user is {}."),
        ("What is my name?", "Who am I?", "Tell me my name."),
    ),
    "colour": (
        COLOURS,
        ("My favourite colour is {}.", "I like the colour {}."),
        ("The user likes the colour {}.", "The favourite colour of the user is {}."),
        ("What is my favourite colour?", "Which colour do I like?"),
    ),
    "animal": (
        ANIMALS,
        ("I have a {}.", "My pet is a {}."),
        ("The user has a {}.", "The pet of the user is a {}."),
        ("What pet do I have?", "Which animal do I have?", "What is my pet?"),
    ),
    "city": (
        CITIES,
        ("I live in {}.", "My city is {}."),
        ("The user lives in {}.", "The city of the user is {}."),
        ("Where do I live?", "Which city do I live in?"),
    ),
    "number": (
        [str(number) for number in range(100)],
        ("My lucky number is {}.", "I like the number {}."),
        ("The lucky number of the user is {}.", "The user likes the number {}."),
        ("What is my lucky number?", "Which number do I like?"),
    ),
    "word": (
        None,
        ('The code word is "{}".', 'Remember the word "{}".'),
        ('The code word is "{}".',),
        ("What is the code word?", "Which word did you see?", "Tell me the code word."),
    ),
}


def make_word(rng):
    """Return 3 to 6 lowercase letters: a real word, one that could be spoken, or any letters."""
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(WORDS)
    length = rng.randint(3, 6)
    if draw < 0.55:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
    word = ""
    while len(word) < length:
        word += rng.choice(ONSETS)
        word += rng.choice(VOWELS)
    return word[:length]


def make_sum(rng):
    top = rng.choice((9, 30, 99, 99))
    a = rng.randint(0, top)
    b = rng.randint(0, min(top, 99 - a))
    if rng.random() < 0.5:
        a, b = b, a
    question = rng.choice(
        (
            "What is {} + {}?",
            "What is {} + {}?",
            "What is {} plus {}?",
            "How much is {} + {}?",
            "Add {} and {}.",
            "{} + {} = ?",
            "{} + {}",
        )
    )
    return question.format(a, b), str(a + b)


def make_counting(rng):
    start = rng.randint(0, 94)
    kind = rng.randrange(4)
    if kind == 0:
        question = rng.choice(("What comes after {}?", "Which number comes after {}?", "What number is next after {}?"))
        return question.format(start), str(start + 1)
    if kind == 1:
        stop = start + rng.randint(2, 5)
        question = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Count up from {} to {}."))
        return question.format(start, stop), ", ".join(str(number) for number in range(start, stop + 1))
    given = [str(number) for number in range(start, start + rng.randint(2, 3))]
    question = rng.choice(
        ("Count on: {},", "Continue: {},", "Count on from {}: {},", "Give the next three numbers: {}")
    )
    answer = ", ".join(str(start + len(given) + i) for i in range(3))
    shown = ", ".join(given)
    return (question.format(start, shown) if question.count("{}") == 2 else question.format(shown)), answer


def make_reversing(rng):
    word = make_word(rng)
    question = rng.choice(
        (
            'Reverse "{}".',
            'Reverse the word "{}".',
            'Spell "{}" backwards.',
            'What is "{}" backwards?',
            'Write "{}" in reverse.',
        )
    )
    return question.format(word), word[::-1]


def make_languages(rng):
    language = rng.choice(list(NUMBER_WORDS))
    number = rng.randrange(len(ENGLISH))
    word = NUMBER_WORDS[language][number]
    if rng.random() < 0.25:
        question = rng.choice(
            ("Which number is {}?", "What number is {}?", "Which number is {} in {}?", "Read this number: {}")
        )
        return question.format(word, language), str(number)
    question = rng.choice(
        (
            "What is {} in {}?",
            "Write {} in {}.",
            "Say {} in {}.",
            "Write the number {} in {}.",
            "Translate {} into {}.",
            "How do you say {} in {}?",
            "How do you write {} in {}?",
        )
    )
    return question.format(rng.choice((str(number), ENGLISH[number])), language), word


def make_emoji(rng):
    noun = rng.choice(list(EMOJI))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(("Name this emoji: {}", "What is this: {}", "What does {} show?")).format(EMOJI[noun]), noun
    if kind == 1:
        question = rng.choice(
            ("What is the emoji for {}?", "Emoji for {}?", "Which emoji is a {}?", "Write {} as an emoji.")
        )
        return question.format(noun), EMOJI[noun]
    count = rng.randint(1, 5)
    shown = noun if count == 1 else IRREGULAR_PLURALS.get(noun, noun + "s")
    question = rng.choice(("Show {} {}.", "Show me {} {}.", "Draw {} {}.", "Give me {} {}."))
    return question.format(rng.choice((str(count), ENGLISH[count])), shown), EMOJI[noun] * count


def make_greeting(rng):
    answer = rng.choice(list(GREETINGS))
    return rng.choice(GREETINGS[answer]), answer


GENERATORS = {
    "sums": make_sum,
    "counting": make_counting,
    "reversing": make_reversing,
    "languages": make_languages,
    "emoji": make_emoji,
}
FAMILIES = (*GENERATORS, "recall")
SHARES = {"sums": 0.22, "counting": 0.12, "reversing": 0.26, "languages": 0.13, "emoji": 0.07, "recall": 0.20}


def held_out(text):
    """Whether a question with this text belongs to the tenth that is never trained."""
    return hashlib.sha256(text.encode()).digest()[0] % 10 == 0


def make_question(rng, family, held):
    """Return a question and its answer, from the held-out texts or from the others."""
    while True:
        question, answer = GENERATORS[family](rng)
        if held_out(question) == held:
            return question, answer


def make_recall(rng, held):
    """Return facts for the system turn, facts for user turns, and a question about one of them with its answer.

    The text that decides about holding out is that of all facts and the question together.
    """
    while True:
        system_facts, user_facts, asked = [], [], []
        for kind in rng.sample(list(FACTS), rng.choice((1, 1, 2))):
            values, user_texts, system_texts, question_texts = FACTS[kind]
            value = rng.choice(values) if values else make_word(rng)
            if rng.random() < 0.35:
                system_facts.append(rng.choice(system_texts).format(value))
            else:
                user_facts.append(rng.choice(user_texts).format(value))
            asked.append((rng.choice(question_texts), value))
        question, answer = rng.choice(asked)
        if held_out("\n".join((*system_facts, *user_facts, question))) == held:
            return system_facts, user_facts, question, answer


def small_talk(rng):
    """Return a trained question of any family that needs no earlier turn, and its answer."""
    if rng.random() < 0.06:
        return make_greeting(rng)
    family = rng.choices(list(GENERATORS), [SHARES[name] for name in GENERATORS])[0]
    return make_question(rng, family, held=False)


def make_conversation(rng, family, held):
    """Return messages that end with the answer to a question of the family; all earlier questions are trained ones."""
    system = [rng.choice(SYSTEM_PROMPTS)] if rng.random() < 0.25 else []
    turns = []
    if family == "recall":
        system_facts, user_facts, question, answer = make_recall(rng, held)
        system += system_facts
        if len(user_facts) == 2 and rng.random() < 0.5:
            user_facts = [" ".join(user_facts)]
        turns += [(fact, "OK.") for fact in user_facts]
        turns += [small_talk(rng) for _ in range(rng.choice((0, 0, 0, 1)))]
    else:
        turns += [small_talk(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]
        question, answer = make_question(rng, family, held)
    messages = [{"role": "system", "content": " ".join(system)}] if system else []
    for user, assistant in (*turns, (question, answer)):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages


def training_conversations(rng):
    """Yield conversations without end."""
    while True:
        if rng.random() < 0.02:
            question, answer = make_greeting(rng)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        family = rng.choices(FAMILIES, [SHARES[name] for name in FAMILIES])[0]
        yield make_conversation(rng, family, held=False)


def questions(seed, count):
    """Yield `count` different held-out questions as (family, messages, answer), the families in turn.

    The messages are a chat that ends with the user's question, with or without a system turn and earlier turns.
    """
    rng = random.Random(f"questions {seed}")
    seen = set()
    while len(seen) < count:
        family = FAMILIES[len(seen) % len(FAMILIES)]
        *messages, last = make_conversation(rng, family, held=True)
        text = json.dumps(messages)
        if text not in seen:
            seen.add(text)
            yield family, messages, last["content"]


def render(messages):
    """Return the ChatML text of a conversation, as the chat template gives it."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def build_tokenizer(seed):
    """Return a byte-level BPE tokenizer whose merges start at a space or a capital letter."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZER_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    conversations = training_conversations(random.Random(f"tokenizer {seed}"))
    pieces = collections.Counter()
    for _ in range(20000):
        for message in next(conversations):
            pieces.update(piece for piece, _ in splitter.pre_tokenize_str(message["content"]))
    space = "Ġ"  # how byte-level BPE writes a space
    words = {piece: list(piece) for piece in pieces if piece[0] == space or "A" <= piece[0] <= "Z"}
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(ROLE_MERGES)
    vocabulary += [left + right for left, right in merges]
    while len(vocabulary) + len(SPECIAL_TOKENS) < VOCAB_SIZE:
        pairs = collections.Counter()
        for piece, symbols in words.items():
            if len(symbols) > 1 and symbols[1].isascii():
                pairs[symbols[0], symbols[1]] += pieces[piece]
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        merges.append((left, right))
        vocabulary.append(left + right)
        for symbols in words.values():
            if symbols[:2] == [left, right]:
                symbols[:2] = [left + right]

    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tokenizer(tokenizer):
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json("tokenizer_config.json", settings)


def write_json(name, value):
    text = json.dumps(value, indent=2, ensure_ascii=False)
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Training


def encode(tokenizer, messages):
    """Return the token ids of a conversation and, for each, whether it belongs to an answer (or ends one)."""
    ids, is_answer = [], []
    for message in messages:
        opening = tokenizer.encode(f"<|im_start|>{message['role']}\n").ids
        body = tokenizer.encode(f"{message['content']}<|im_end|>").ids
        newline = tokenizer.encode("\n").ids
        ids += opening + body + newline
        is_answer += [False] * len(opening) + [message["role"] == "assistant"] * len(body) + [False] * len(newline)
    return ids, is_answer


def make_batch(rows, pad_id):
    """Return padded inputs and targets; targets outside answers are -100, which the loss leaves out."""
    import torch

    length = max(len(ids) for ids, _ in rows) - 1
    inputs = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), -100)
    for row, (ids, is_answer) in enumerate(rows):
        ids = torch.tensor(ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = torch.where(torch.tensor(is_answer[1:]), ids[1:], -100)
    return inputs, targets


def batches(tokenizer, seed):
    """Yield batches of about BATCH_TOKENS tokens without end, each of conversations of similar length."""
    rng = random.Random(f"training {seed}")
    conversations = training_conversations(rng)
    pad_id = tokenizer.token_to_id("<|endoftext|>")
    while True:
        pool = sorted((encode(tokenizer, next(conversations)) for _ in range(POOL_SIZE)), key=lambda row: len(row[0]))
        groups, group = [], []
        for row in pool:
            if group and len(row[0]) * (len(group) + 1) > BATCH_TOKENS:
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
        rng.shuffle(groups)
        for group in groups:
            yield make_batch(group, pad_id)


def fake_int8(weight):
    """Return the weight as 8-bit rounding with one scale per row leaves it."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def fake_int4(weight):
    """Return the weight as 4-bit rounding leaves it, in groups of 64 inputs with a least-squares scale and zero."""
    groups = weight.reshape(weight.shape[0], -1, 64)
    low = groups.amin(dim=2, keepdim=True)
    step = (groups.amax(dim=2, keepdim=True) - low).clamp(min=1e-12) / 15
    codes = ((groups - low) / step).round()
    offset = codes.mean(dim=2, keepdim=True)
    mean = groups.mean(dim=2, keepdim=True)
    centred = codes - offset
    scale = (centred * (groups - mean)).sum(dim=2, keepdim=True) / centred.square().sum(dim=2, keepdim=True).clamp(
        min=1
    )
    return (mean + scale * centred).reshape(weight.shape)


def quantize(model, fake):
    """Replace the decoder's matrices by their rounded values and the embedding by 8-bit rows; return the originals."""
    originals = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            originals[name] = parameter.data
            parameter.data = fake_int8(parameter.data) if "embed_tokens" in name else fake(parameter.data)
    return originals


def restore(model, originals):
    for name, parameter in model.named_parameters():
        if name in originals:
            parameter.data = originals[name]


def answer_loss(model, inputs, targets):
    import torch

    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    chosen = targets != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), targets[chosen])


def teacher_forced_accuracy(model, tokenizer, count):
    """Return by family how many held-out answers are right, which without sampling one pass decides."""
    import torch

    right, asked = collections.Counter(), collections.Counter()
    for family, messages, answer in questions(0, count):
        ids, _ = encode(tokenizer, [*messages, {"role": "assistant", "content": answer}])
        length = len(tokenizer.encode(f"{answer}<|im_end|>").ids)
        end = len(ids) - 1
        with torch.no_grad():
            best = model(input_ids=torch.tensor([ids[:end]])).logits[0].argmax(dim=1)
        asked[family] += 1
        right[family] += best[end - length - 1 : end - 1].tolist() == ids[end - length : end]
    return {family: right[family] / asked[family] for family in FAMILIES}


def train(seed, steps):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)  # a second thread gains only a fifth at this size
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    write_tokenizer(tokenizer)
    model = Qwen2ForCausalLM(Qwen2Config(**{**CONFIG, "torch_dtype": "float32"}))
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    data = batches(tokenizer, seed)
    start = time.monotonic()
    losses = []
    for step in range(steps):
        factor = min(1, (step + 1) / WARMUP_STEPS, 2 * (steps - step) / steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        originals = quantize(model, fake_int4) if step >= steps - QUANTIZED_STEPS and step % 2 else {}
        loss = answer_loss(model, *next(data))
        optimizer.zero_grad()
        loss.backward()
        restore(model, originals)  # the gradient at the rounded weights moves the exact ones
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {sum(losses) / len(losses):.4f} {time.monotonic() - start:.0f} s", flush=True)
            losses = []
        if (step + 1) % 1000 == 0 or step + 1 == steps:
            print(teacher_forced_accuracy(model, tokenizer, 120), flush=True)
    write_model(model)


def write_model(model):
    """Write the weights in fp16 as two shards with an index, and the configuration."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    names = list(tensors)
    half = next(
        i for i, name in enumerate(names) if name.startswith(f"model.layers.{CONFIG['num_hidden_layers'] // 2}.")
    )
    weight_map = {}
    for number, part in ((1, names[:half]), (2, names[half:])):
        file_name = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, FOLDER / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json("model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    write_json("config.json", CONFIG)
    stops = [CONFIG["eos_token_id"], CONFIG["pad_token_id"]]
    write_json(
        "generation_config.json", {"do_sample": False, "eos_token_id": stops, "pad_token_id": CONFIG["pad_token_id"]}
    )


def check(count):
    """Print the greedy accuracy of the committed files on held-out questions, by family and precision."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    asked = list(questions(1, count))
    totals = collections.Counter(family for family, _, _ in asked)
    for precision, fake in (("fp16 weights", None), ("int8", fake_int8), ("int4", fake_int4)):
        originals = quantize(model, fake) if fake else {}
        right = collections.Counter()
        for first in range(0, count, 50):
            part = asked[first : first + 50]
            prompts = [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for _, messages, _ in part
            ]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True)
            outputs = model.generate(**inputs, max_new_tokens=40, do_sample=False)
            texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for (family, messages, answer), text in zip(part, texts):
                right[family] += text == answer
                if text != answer:
                    print(f"{precision}: {messages[-1]['content']!r} gave {text!r}, not {answer!r}")
        restore(model, originals)
        families = ", ".join(f"{family} {100 * right[family] / totals[family]:.1f}" for family in FAMILIES)
        print(f"{precision}: {100 * sum(right.values()) / count:.1f} % of {count} ({families})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--check", action="store_true", help="measure the committed model instead of training one")
    parser.add_argument("--count", type=int, default=600, help="questions for --check")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.count)
    else:
        train(arguments.seed, arguments.steps)


if __name__ == "__main__":
    main()
