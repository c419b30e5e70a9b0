#!/usr/bin/env python3
"""Make the demo EAGLE-3 head: a small draft head for a small Llama-architecture chat model, on a CPU.

Sub-commands, in the order of the chain (every path is an argument):

  target    a GGUF file -> a model folder (fp32 safetensors, config, tokenizer, chat template)
  prompts   training prompts, templates x topics; nothing of the held-out prompts or their topics
  generate  the target answers prompts; tokens and, for every position, four hidden states are stored
  train     fit the head with EAGLE-3's training-time test; writes it in the layout vLLM loads
  evaluate  replay stored greedy answers round by round with a stored head; acceptance for k = 1, 2, ...

Conventions (as in vLLM's LlamaForCausalLMEagle3):

* auxiliary state i is the residual stream entering layer i, without norm; layers (2, L // 2, L - 3);
* draft step 1 at position t reads embed(token[t + 1]) and fc(cat(aux[t])) and predicts token[t + 2];
* step j > 1 reads the previous draft and the head's own pre-norm output, at position t + j - 1;
* q, k and v see cat(input_layernorm(embedding), hidden_norm(hidden)); the residual is the plain hidden state.

Shapes in docstrings: B conversations, T tokens, W draft start positions ("bases"), H hidden size, D head
dimension, V draft vocabulary.  Lengths count tokens, times are minutes unless a name says otherwise.
This trains a fixture for demos and tests of one small model; it is no recipe for heads of other models.
"""

import argparse
import copy
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor
CONTROL_TOKENS = 3  # <|endoftext|>, <|im_start|>, <|im_end|> always stay in the draft vocabulary


# --------------------------------------------------------------------------------------------- target folder
def cmd_target(args: argparse.Namespace) -> None:
    """Turn a Llama GGUF into a folder with fp32 safetensors, config, tokenizer and chat template."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = gguf.GGUFReader(str(args.gguf))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    hidden = meta["llama.embedding_length"]
    head_dim = hidden // heads
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")
        if part[0] == "token_embd":
            key = "model.embed_tokens.weight"
        elif part[0] == "output_norm":
            key = "model.norm.weight"
        else:
            key = f"model.layers.{part[1]}.{names[part[2]]}.weight"
            if part[2] in ("attn_q", "attn_k"):  # llama.cpp interleaves the two rotary halves
                n = heads if part[2] == "attn_q" else kv_heads
                array = array.reshape(n, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
        weights[key] = torch.from_numpy(np.ascontiguousarray(array))
    args.target.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.target / "model.safetensors", metadata={"format": "pt"})
    ids = {
        name: meta[f"tokenizer.ggml.{short}_token_id"]
        for name, short in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.1e}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in {t.name for t in reader.tensors},
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["pad"],
    }
    write_json(args.target / "config.json", config)
    write_json(args.target / "generation_config.json", {f"{k}_token_id": ids[k] for k in ("bos", "eos", "pad")})
    pieces, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    tokenizer.save(str(args.target / "tokenizer.json"))
    write_json(
        args.target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{k}_token": pieces[i] for k, i in ids.items()},
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
    print(f"{len(weights)} tensors -> {args.target}")


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# --------------------------------------------------------------------------------------------------- prompts
def split(text: str) -> list[str]:
    """Entries between the bars of a text block."""
    return [part.strip() for part in text.replace("\n", " ").split("|") if part.strip()]


# Topics of the held-out prompts: no training prompt may match.
HELD_OUT_WORDS = re.compile(
    r"glacier|bicycl|\bbikes?\b|\bowls?\b|printing press|tornado|potter|noise pollut|batter(y"
    r"|ies)|olympic|lighthouse|vitamin|poetry|anagram|median|linked list|insect|dessert|africa"
    r"|ferry|\bcoins?\b|paper airplane|\bclimate|weather|grandmother|birthday message|blue sky"
    r"|sky blue|\bbeach|haiku|autumn|\bsql\b.*recent|romeo|stain|train station|by size"
    r"|states of matter|tuple|vegetable soup|\b240\b|joke about computers",
    re.IGNORECASE,
)
TOPICS = split(
    """
photosynthesis | the water cycle | gravity | black holes | vaccines | the human heart | earthquakes |
volcanoes | rainbows | magnets | electric cars | solar panels | wind turbines | the internet | Wi-Fi |
computer memory | operating systems | databases | encryption | machine learning | neural networks |
recursion | binary search | sorting algorithms | the stock market | inflation | supply and demand | compound
interest | budgeting | the French Revolution | the Roman Empire | ancient Egypt | the Silk Road | the
Renaissance | the Industrial Revolution | World War I | World War II | the Cold War | the Moon landing |
democracy | the United Nations | global warming | recycling | rainforests | coral reefs | penguins | honey
bees | dolphins | elephants | butterflies | cats | dogs | horses | bread making | coffee | tea | chocolate |
cheese | pasta | healthy eating | sleep | exercise | yoga | meditation | stress | time management | public
speaking | writing essays | learning a language | playing the guitar | the piano | jazz music | painting |
photography | chess | football | basketball | swimming | running | hiking | gardening | camping | space
travel | Mars | the Sun | the Moon | tides | DNA | cells | bacteria | viruses | atoms | chemical reactions |
fractions | probability | statistics | geometry | prime numbers | job interviews | teamwork | leadership |
friendship | small businesses | marketing | online shopping | libraries | museums | trains | airplanes |
bridges | skyscrapers | robots | deserts | rivers | lakes | oceans | mountains | islands | caves |
waterfalls | hurricanes | floods | lightning | snow | clouds | fog | the ozone layer | air pollution | water
pollution | soil erosion | deforestation | endangered species | whales | sharks | octopuses | turtles |
frogs | snakes | lizards | eagles | parrots | hummingbirds | chickens | cows | sheep | goats | pigs |
rabbits | foxes | wolves | bears | lions | tigers | giraffes | monkeys | kangaroos | koalas | pandas | bats
| spiders | ants | snails | dinosaurs | fossils | evolution | natural selection | genetics | the immune
system | the brain | the lungs | the digestive system | bones and muscles | blood | skin care | eyesight |
hearing | allergies | the common cold | first aid | dental health | mental health | nutrition | proteins |
carbohydrates | fasting | obesity | diabetes | antibiotics | surgery | hospitals | nursing | pharmacies |
acupuncture | massage | dancing | ballet | hip hop music | classical music | opera | folk songs | the violin
| the drums | the flute | singing | karaoke | theater | movies | animation | video games | board games |
card games | puzzles | magic tricks | juggling | origami | knitting | sewing | woodworking | home repair |
interior design | architecture | cathedrals | castles | pyramids | the Great Wall of China | the Eiffel
Tower | Machu Picchu | the Taj Mahal | Stonehenge | the Vikings | samurai | knights | pirates | explorers |
Christopher Columbus | Marco Polo | Leonardo da Vinci | Isaac Newton | Albert Einstein | Marie Curie |
Charles Darwin | Nikola Tesla | Galileo Galilei | Ada Lovelace | Alan Turing | Mozart | Beethoven | Vincent
van Gogh | Pablo Picasso | William Shakespeare | Jane Austen | Charles Dickens | Martin Luther King Jr. |
Abraham Lincoln | Mahatma Gandhi | Nelson Mandela | Cleopatra | Julius Caesar | Napoleon | Queen Victoria |
the American Civil War | the Great Depression | the Black Death | the Magna Carta | the Declaration of
Independence | human rights | freedom of speech | elections | taxes | courts | police work | firefighters |
the military | diplomacy | immigration | refugees | poverty | homelessness | education | kindergarten |
universities | homework | exams | scholarships | online courses | teachers | bullying | study habits | note
taking | critical thinking | logic | philosophy | ethics | Buddhism | Islam | Christianity | Hinduism |
Judaism | mythology | Greek gods | fairy tales | science fiction | fantasy novels | detective stories |
biographies | comic books | newspapers | journalism | radio | television | podcasts | social media |
blogging | email | smartphones | tablets | laptops | keyboards | computer mice | printers | 3D printing |
virtual reality | drones | GPS | satellites | telescopes | microscopes | the Hubble telescope | comets |
asteroids | galaxies | the Milky Way | the Big Bang | dark matter | quantum mechanics | relativity |
thermodynamics | electricity | magnetism | light | sound | heat | friction | pressure | density | acids and
bases | metals | plastics | glass | paper | wood | concrete | steel | gold | diamonds | oil | natural gas |
coal | nuclear power | hydroelectric dams | geothermal energy | biofuels | hydrogen | energy saving |
insulation | smart homes | refrigerators | microwaves | washing machines | vacuum cleaners | bicycles | cars
| buses | trucks | motorcycles | ships | submarines | helicopters | rockets | space stations | traffic |
road safety | parking | public transport | travel planning | packing a suitcase | hotels | passports |
airports | tourism | backpacking | road trips | cruises | skiing | snowboarding | surfing | sailing |
fishing | rock climbing | tennis | golf | baseball | volleyball | cricket | rugby | boxing | karate |
gymnastics | marathons | weight lifting | stretching | walking | cooking | baking | grilling | salads |
soups | sandwiches | pizza | sushi | tacos | curry | rice | potatoes | tomatoes | onions | garlic | apples |
bananas | berries | mushrooms | nuts | eggs | milk | yogurt | honey | sugar | salt | spices | olive oil |
wine | beer | juice | water | meal planning | food safety | farming | greenhouses | irrigation | fertilizers
| composting | seeds | trees | flowers | roses | cacti | grass | bonsai | orchards | vineyards | markets |
supermarkets | advertising | branding | customer service | sales | negotiation | contracts | accounting |
insurance | banks | credit cards | loans | mortgages | saving money | investing | retirement |
cryptocurrency | blockchain | startups | crowdfunding | franchises | freelancing | remote work | meetings |
email etiquette | productivity | procrastination | goal setting | motivation | creativity | brainstorming |
problem solving | decision making | emotional intelligence | empathy | kindness | gratitude | happiness |
loneliness | anger | fear | courage | patience | honesty | trust | marriage | parenting | babies | teenagers
| grandparents | pets | neighbors | volunteering | charity | community gardens | cities | villages | suburbs
| urban planning | parks | playgrounds | zoos | aquariums | circuses | festivals | Christmas | Halloween |
New Year's Eve | Thanksgiving | birthdays | weddings | gifts | fashion | shoes | jewelry | hats | makeup |
hair care | perfume | furniture | lamps | candles | clocks | calendars | maps | compasses | flags | money |
numbers | zero | infinity | algebra | calculus | trigonometry | matrices | graphs | equations | percentages
| measurement | the metric system | Python programming | JavaScript | HTML | CSS | Java | C programming |
Linux | Git | web servers | APIs | cloud computing | cybersecurity | passwords | computer viruses |
firewalls | debugging | unit tests | open source software | data science | big data | spreadsheets |
computer graphics | chatbots | speech recognition | self-driving cars | artificial intelligence | algorithms
| data structures | hash tables | graph theory | object-oriented programming | functional programming | user
interfaces | mobile apps | search engines | web browsers | cookies | compilers | processors | Japan | China
| India | Brazil | Mexico | Canada | Australia | Germany | France | Italy | Spain | Greece | Turkey | Russia
| Egypt | Norway | Iceland | Switzerland | the Netherlands | Paris | London | New York | Tokyo | Rome |
Venice | the Amazon River | the Nile | Mount Everest | the Grand Canyon | the Sahara | Antarctica | the
Arctic | the Pacific Ocean | the Great Barrier Reef
"""
)
TOPIC_TEMPLATES = split(
    """
Explain {t} in simple terms. | What is the most important thing to know about {t}? | Give me five facts
about {t}. | Write a short paragraph about {t}. | List the advantages and disadvantages of {t}. | Write a
short poem about {t}. | Explain {t} to a ten-year-old child. | How does {t} affect our daily life? | Write a
short story about {t}. | Give me three tips about {t} for beginners. | What are some common misconceptions
about {t}? | Write an introduction for an essay about {t}. | Create a short quiz with three questions about
{t} and give the answers. | Write a dialogue between a teacher and a student about {t}. | Why is {t}
interesting? | Write an email to a friend about {t}. | What should I read to learn more about {t}? |
Summarize what you know about {t} in two sentences. | Describe the history of {t} briefly. | Write a blog
post introduction about {t}. | Make a bullet list of key terms related to {t} with definitions. | What
questions do people often ask about {t}? | Give a step-by-step plan to study {t} in one week. | Write a
formal letter asking a library for books on {t}.
"""
)
MORE_TEMPLATES = split(
    """
Tell me about {t}. | What do you know about {t}? | Can you explain why {t} matters? | I know nothing about
{t}. Where do I start? | Write a limerick about {t}. | Write a song about {t}. | Write a title and an
outline for an article about {t}. | Write a newspaper headline and first paragraph about {t}. | Compare {t}
and {u}. | What do {t} and {u} have in common? | What is the difference between {t} and {u}? | Write a funny
story in which {t} and {u} play a role. | Give me an analogy for {t}. | Write a tweet about {t}. | What are
the main causes and effects related to {t}? | What would the world be like without {t}? | Write a speech
about {t} for a school assembly. | Name three famous examples related to {t}. | Write a riddle about {t} and
give the answer. | Write a conversation between two friends about {t}. | Give me ten words that are related
to {t}. | Write a persuasive paragraph in favor of {t}. | What is a common problem with {t}, and how can it
be solved? | Ask me three questions about {t}. | Write a diary entry about {t}. | Explain {t} like an
expert. | Write a glossary entry for {t}. | How has {t} changed over the last hundred years? | Make a table
with three facts about {t}. | Write a JSON object that describes {t}. | Explain {t} in exactly three
sentences. | Is {t} good or bad? Give your opinion. | Write a multiple-choice question about {t}. | Write a
product idea inspired by {t}. | Define {t}. | Give me a fun activity for children about {t}. | What skills
do I need to understand {t}? | Write a short lesson plan about {t}. | What are the key points about {t}? |
Describe {t} using the five senses. | hi, can you help me understand {t}? thanks! | Please write a brief
report about {t}. | I have to give a talk about {t} tomorrow. Help me prepare.
"""
)
FOLLOW_UPS = split(
    """
Summarize your answer in one sentence. | Can you explain that in simpler words? | Give me an example. |
Translate your answer into Spanish. | Translate your answer into French. | Translate your answer into
German. | Rewrite your answer as a bullet list. | Make it shorter. | Make it longer and add more detail. |
Why? | Thanks! What should I learn next? | Rewrite that in a more formal style. | Write three questions
about your answer. | Are you sure? | Repeat your answer exactly. | Turn your answer into a short poem. |
What are the key facts in your answer? | Give your answer a title. | Extract the key facts from your answer
as JSON. | Continue. | Tell me more about the last point. | What is the main idea of your answer?
"""
)
CODE_TASKS = split(
    """
reverses a string | checks whether a number is prime | computes the factorial of a number | counts the
vowels in a string | finds the largest number in a list | sorts a list of numbers | removes duplicates from
a list | merges two dictionaries | reads a file and counts its lines | checks if a string is a palindrome |
converts Celsius to Fahrenheit | computes the average of a list | finds the common elements of two lists |
flattens a nested list | counts the words in a sentence | computes the greatest common divisor | implements
binary search | implements bubble sort | implements a stack | implements a queue | generates random
passwords | validates an email address | computes the sum of digits | finds the second largest value in a
list | capitalizes each word of a sentence | transposes a matrix | parses a CSV file | groups words by their
first letter | rotates a list by k positions | computes the power of a number | prints the Fibonacci
sequence | checks whether a year is a leap year | converts a decimal number to binary | converts kilometers
to miles | counts how often each character appears | finds the longest word in a sentence | multiplies two
matrices | implements quicksort | implements merge sort | implements insertion sort | implements selection
sort | implements a binary search tree | computes the least common multiple | computes the area of a circle
| simulates rolling two dice | plays rock, paper, scissors | guesses a number between 1 and 100 | checks
whether parentheses are balanced | encrypts a text with the Caesar cipher | computes the mode of a list |
computes the standard deviation of a list | shuffles a list | zips two lists into a dictionary | inverts a
dictionary | filters the even numbers of a list | squares every element of a list | computes the dot product
of two vectors | finds all the divisors of a number | computes the Hamming distance of two strings | removes
all the spaces from a string | replaces every vowel with a star | prints a multiplication table | prints a
triangle of stars | draws a chessboard with text | reads JSON from a file and prints one field | writes a
list of names to a text file | downloads a web page | renames all the files in a folder | copies a file |
measures how long a function takes | retries a function three times | caches the results of a function |
sorts a list of dictionaries by a key | finds the missing number in a list from 1 to n | merges two sorted
lists | finds pairs that add up to a target sum | computes the intersection of two sets | splits a list into
chunks | counts the lines, words and characters of a text | formats a number with commas | parses a date
string | computes the days between two dates | prints the current time | implements a simple calculator |
implements a bank account | implements a shopping cart | implements a to-do list | implements a counter with
a button | implements a phone book | implements a priority queue | implements depth-first search |
implements breadth-first search | computes the depth of a tree | reverses the words of a sentence | converts
a Roman numeral to an integer | converts an integer to a Roman numeral | checks whether a number is perfect
| finds the smallest element of an array | sums the diagonal of a matrix | swaps two variables | logs
messages to a file
"""
)
CODE_TEMPLATES = split(
    """
Write a Python function that {t}. | Write a JavaScript function that {t}. | Write a Python function that {t}
and explain how it works. | Write a Python class or function that {t}, with a docstring and a small test. |
How would I write a program that {t}? Show the code. | Write a C function that {t}. | Write a Java method
that {t}. | Write a TypeScript function that {t}. | Write a Go function that {t}. | Write a Rust function
that {t}. | Write a C++ program that {t}. | Write a Ruby method that {t}. | Show me the shortest Python code
that {t}. | Write unit tests for a Python function that {t}. | Write pseudocode for an algorithm that {t}. |
Explain step by step how a program {t}. | Write a bash script that {t}. | Write a Python program that asks
the user for input and {t}.
"""
)
CODE_CHAT = split(
    """
Write a SQL query that selects all the customers from Germany. | Write a SQL query that counts the orders
per customer. | Write a SQL query that joins the tables users and payments. | Write a SQL query that finds
the five most expensive products. | Write a SQL statement that creates a table for books. | Write a SQL
query that returns the average salary per department. | Write a SQL query that deletes inactive users. |
Write a SQL query that updates the price of a product. | Write a SQL query that lists the employees hired
after 2020. | Explain what a JOIN does in SQL. | What is an index in a database? | Write a bash command that
counts the files in a folder. | Write a bash command that finds all the Python files. | Write a bash command
that shows the disk usage. | Write a bash command that replaces a word in a file. | Write a bash command
that prints the first ten lines of a file. | Write a bash command that kills a process. | Write a bash
command that copies a folder to another machine. | Write a bash loop that prints the numbers from 1 to 10. |
Explain the difference between a list and a dictionary in Python. | Explain the difference between a set and
a list in Python. | Explain the difference between == and is in Python. | What is a decorator in Python? |
What is a generator in Python? | What is a lambda function? | What is a class in Python? | Explain
inheritance with an example. | Explain exceptions in Python. | What does the yield keyword do? | How do I
read a file in Python? | How do I install a Python package? | How do I make a virtual environment? | Explain
the difference between let and const in JavaScript. | What is a closure in JavaScript? | What is a promise
in JavaScript? | Explain the difference between an array and an object in JavaScript. | Explain the
difference between a stack and a queue. | Explain the difference between a process and a thread. | Explain
the difference between TCP and UDP. | Explain the difference between HTTP and HTTPS. | Explain the
difference between RAM and a hard disk. | Explain the difference between a compiler and an interpreter. |
Explain the difference between Git and GitHub. | How do I undo the last commit in git? | How do I merge two
branches in git? | How do I resolve a merge conflict? | Write a .gitignore for a Python project. | Write a
Dockerfile for a Python web app. | Write a docker-compose file with a web server and a database. | Write an
HTML page with a heading and a list. | Write an HTML form with a name and an email field. | Write an HTML
table with three rows. | Write CSS that makes a button blue. | How do I center a div in CSS? | Write CSS for
a two-column layout. | Write a regular expression that matches a phone number. | Write a regular expression
that matches a date. | Write a regular expression for a zip code. | Write a Flask app with one route. |
Write an Express server with one route. | Write a README for a small Python tool. | What is a REST API? |
What is JSON? | What is YAML? | Explain what a Docker container is. | What is Kubernetes? | What is a unit
test? | What is the time complexity of binary search? | Explain big O notation. | What is recursion? Give an
example in Python. | Write a JSON object with the name, age and city of a person. | Write a YAML file with
three servers. | Write a CSV with five students and grades. | Find the bug: for i in range(10) print(i) |
Find the bug: def add(a, b): return a - b | Fix this code: if x = 5: print('five') | What does this code
print? print([x * 2 for x in range(4)]) | What does this code do? sorted(words, key=len) | What does this
code print? a = [1, 2]; b = a; b.append(3); print(a) | Add comments to this code: def f(n): return 1 if n <
2 else n * f(n - 1) | Rewrite this loop as a list comprehension: out = []; for x in xs: out.append(x + 1)
"""
)
LISTS = split(
    """
fruits | vegetables | European countries | Asian countries | South American countries | capital cities |
rivers | mountains | programming languages | musical instruments | sports | famous scientists | famous
painters | classic novels | birds | sea animals | trees | flowers | colors | planets and moons | kitchen
tools | office supplies | board games | dance styles | healthy snacks | breakfast foods | wild animals |
inventions | languages | islands | professions | pasta dishes | cheeses | spices | soups | drinks | herbs |
grains | fish | dog breeds | cat breeds | farm animals | reptiles | dinosaurs | constellations | chemical
elements | gemstones | rocks and minerals | natural disasters | types of clouds | bones of the body | organs
of the body | emotions | hobbies | school subjects | holidays | toys | card games | video games | movie
genres | music genres | famous composers | famous writers | poets | philosophers | presidents | explorers |
queens and kings | ancient civilizations | world wonders | famous bridges | famous museums | universities |
car brands | airlines | types of boats | tools | pieces of furniture | household chores | clothes | shoes |
fabrics | hairstyles | shapes | units of measurement | currencies | newspapers | websites | mobile apps |
file formats | web browsers | databases | Python libraries | HTML tags | Linux commands | keyboard shortcuts
| computer parts | algorithms | data structures | job interview questions | icebreaker questions | good
habits | gift ideas | party games | date ideas | weekend activities | summer activities | winter sports |
team sports | yoga poses | exercises | safety rules | ways to save energy | ways to save water | ways to
relax | ways to say thank you | synonyms for happy | synonyms for big | adjectives | verbs | proverbs |
idioms | French words | Spanish phrases | names for a cat | names for a bakery | book titles | team names |
business ideas | blog topics
"""
)
LIST_TEMPLATES = split(
    """
List ten {t}. | Name five {t} and describe each in one sentence. | Give me a numbered list of eight {t}. |
Make a table of six {t} with a short note on each. | Write a JSON array of five {t} with the keys name and
description. | Name three {t}. | List seven {t} in alphabetical order. | Write a Markdown table of four {t}
with two columns. | Write a YAML list of five {t}. | Write a CSV with five {t} and a rating from 1 to 10. |
Which {t} do you like most, and why? | Sort five {t} into two groups. | Write a Python list with ten {t}. |
List 5 {t} separated by commas. | Give me a bulleted list of twelve {t}. | Write an HTML list of six {t}.
"""
)
STORIES = split(
    """
The city council met on Tuesday to discuss the new park. Many residents asked for more trees and a
playground. The council agreed to set aside money for both and will vote again in June. | Maria opened a
small bakery in 2015. At first she had only two customers a day, but her sourdough bread became popular.
Today she employs twelve people and sells to three restaurants. | Bees visit flowers to collect nectar.
While they do so, pollen sticks to their bodies and is carried to other flowers. This process is called
pollination and it helps plants make seeds. | The train was late because of heavy snow. Passengers waited
for two hours on the platform. The staff gave them hot tea and blankets until the train arrived at midnight.
| A new study found that people who walk for thirty minutes a day sleep better. The researchers followed
four hundred adults for one year and asked them to keep a diary. | The museum has three floors. The first
floor shows dinosaurs, the second floor shows ancient tools, and the third floor shows paintings. Tickets
cost ten dollars and children enter for free. | Water boils at one hundred degrees Celsius at sea level. On
a high mountain the air pressure is lower, so water boils at a lower temperature and food takes longer to
cook. | The software update fixes a bug that made the app crash when the user opened the settings page. It
also adds a dark theme. Users should install it soon. | Last summer we planted tomatoes, beans and carrots
in the garden. The tomatoes grew well, but rabbits ate most of the carrots. This year we will build a fence.
| Anna wanted to learn the violin, but she was afraid that it was too late. Her neighbour, a retired
musician, offered free lessons. After one year Anna played at a small concert.
"""
)
PASSAGE_TEMPLATES = [
    "Summarize: {t}",
    "Summarize the following text in one sentence.\n\n{t}",
    "Rewrite the following text in a more formal style.\n\n{t}",
    "Rewrite this text in simpler words:\n{t}",
    "Extract the key facts from this text as a bullet list.\n\n{t}",
    "Extract the people, places and dates from this text as JSON.\n\n{t}",
    "Translate the following text into French.\n\n{t}",
    "Translate into Spanish: {t}",
    "Write three questions about the following text and answer them.\n\n{t}",
    "Give the following text a title and explain your choice.\n\n{t}",
    "Repeat the following text exactly:\n{t}",
    "Repeat this text twice: {t}",
    "What is the main idea of this passage? {t}",
    "Continue the story: {t}",
    "Translate the following text into German.\n\n{t}",
    "Translate into Italian: {t}",
    "Correct the spelling and grammar of this text:\n{t}",
    "Is the tone of this text positive or negative? {t}",
    "Rewrite this text in the past tense.\n\n{t}",
    "Write a reply to this message: {t}",
    "Make this text funnier: {t}",
    "Turn this text into a short dialogue.\n\n{t}",
    "What happens next? {t}",
    "Who is mentioned in this text? {t}",
    "Return a JSON object with the keys title, summary and keywords for this text.\n\n{t}",
    "Write a headline for this text: {t}",
    "Rewrite the text from the first-person point of view.\n\n{t}",
    "Explain this text to a child: {t}",
    "List the verbs in this text: {t}",
]
PEOPLE = split(
    """
Sara | Ben | Lily | Omar | Nina | Jack | Emma | Raj | Zoe | Leo | Mia | Paul | Ana | Tim | Kate | Sam | Mr.
Lee | Mrs. Brown | Doctor Patel | Aunt Rosa | Ivan | Chen | Fatima | Lucas | Grace | Hugo | Elena | Noah |
Ruth | Victor
"""
)
JOBS = split(
    """
baker | nurse | carpenter | teacher | pilot | gardener | fisherman | engineer | tailor | librarian | painter
| clerk | singer | mechanic | chef | student | shepherd | photographer | journalist | bus driver
"""
)
PLACES = split(
    """
a small village | the harbor | the old market | a mountain valley | the city library | the train yard | a
quiet street | the forest | a farm near the river | the science museum | a busy office | the school yard |
the hospital | the town hall | a bookshop | the airport | a desert town | the castle | the botanical garden
| a hotel
"""
)
FINDS = split(
    """
an old map | a locked box | a letter without a name | a wounded bird | a broken clock | a red umbrella | a
strange key | a bag of seeds | a silver ring | a notebook full of drawings | a lost dog | a painting | a
telescope | a music box | a wallet with two hundred dollars | a rare book
"""
)
THEN = split(
    """
took it home and cleaned it | showed it to the neighbors | put an advertisement in the newspaper | called
the police | asked an old friend for advice | decided to keep it a secret | sold it the next day | gave it
to a museum | wrote a story about it | tried to find the owner | locked it in a drawer
"""
)
ENDS = split(
    """
Nobody ever asked about it again. | A week later a stranger knocked at the door. | The whole town talked
about it for months. | In the end it changed everything. | It was still there the next morning. | Since then
every Sunday has been a little different. | A month later the newspaper printed the whole story. | Everyone
was happy with the result. | The next spring it happened again.
"""
)
MONTHS = split("January|February|March|April|May|June|July|August|September|October|November|December")
DAYS = split("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
EVENTS = split(
    """
the book fair | the summer concert | the science workshop | the staff meeting | the chess tournament | the
cooking class | the charity run | the art exhibition | the photography course | the farmers' market | the
parents' evening | the job fair | the film festival | the blood drive | the hiking trip
"""
)
PRODUCTS = split(
    """
coffee machine | pair of headphones | desk lamp | backpack | blender | phone case | winter jacket | office
chair | toaster | water bottle | camera | keyboard | garden hose | tent | vacuum cleaner | pair of running
shoes | watch | suitcase | guitar | mattress
"""
)
FACTS = split(
    """
Camels can live without water for many days. Their humps store fat, which their bodies turn into energy and
water. | The heart pumps blood through the body. It beats about one hundred thousand times a day and never
rests. | Mount Everest is the highest mountain on Earth. The first climbers reached the top in 1953. | Sound
travels faster in water than in air. Whales use this to talk over long distances. | The first computers
filled whole rooms. Today a phone is thousands of times faster than they were. | Trees take in carbon
dioxide and give off oxygen. A large tree can make enough oxygen for two people. | Gold does not rust. For
this reason people have used it for jewelry for thousands of years. | The Moon goes around the Earth in
about twenty-seven days. The same side always faces us. | Salt was once so valuable that soldiers were paid
with it. The word salary comes from salt. | Coffee was first grown in the highlands of Ethiopia. Traders
brought it to Arabia and later to Europe. | Bamboo is a kind of grass. Some kinds grow almost one meter in a
single day. | Paper was invented in China about two thousand years ago. It was made from bark, old cloth and
fishing nets. | Penguins cannot fly, but they swim very well. Some of them can dive deeper than five hundred
meters. | Glass is made from sand. The sand is heated until it melts, and then it is shaped. | Spiders have
eight legs. They make silk threads that are stronger than steel of the same thickness. | The human body has
206 bones. The smallest of them is in the ear. | Honey does not spoil. Archaeologists have found pots of
honey in old tombs that were still good to eat. | Venus is hotter than Mercury although it is farther from
the Sun. Its thick air keeps the heat. | Rice feeds more than half of the world. It grows best in warm, wet
fields. | Chess came from India. It reached Europe about one thousand years ago.
"""
)
ITEMS = split(
    """
apples | books | pencils | marbles | stamps | cookies | tickets | oranges | shells | cards | eggs | balloons
| bottles | chairs | flowers
"""
)
FORMS = split(
    """
{n} has {a} {it} and buys {b} more. Then {n} gives {c} to {m}. How many {it} does {n} have now? | A box
holds {b} {it}. How many {it} are in {c} boxes? Explain step by step. | {n} and {m} share {bc} {it} equally
among {c} friends. How many does each friend get? | What is {a} plus {b} times {c}? Show your work. | A
train travels {a} kilometers per hour for {c} hours. How far does it go? | Solve for x: {b}x + {c} = {d}. |
What is {p}% of {e}? | What is {a} + {e}? | What is {e} - {a}? | What is {b} x {a}? Show your work. | What
is {bc} divided by {c}? | {n} is {a} years old. {m} is {b} years older. How old is {m}? | A shirt costs {a}
dollars and is reduced by {p} percent. What is the new price? Show your work. | A rectangle is {b} meters
long and {c} meters wide. What is its area? | What is the perimeter of a square with a side of {b}
centimeters? | {n} reads {b} pages a day. How many days does {n} need for {e} pages? | Convert {a}
kilometers to meters. | Convert {c} hours to minutes. | Is {e} an even number? | What comes next: {b}, {b2},
{b3}, ...? | Write the number {e} in words. | Which is larger, {a} or {e}? | Round {a}.{b} to the nearest
whole number. | {n} works {c} hours a day and earns {b} dollars an hour. How much does {n} earn in five
days? | If it is {c} o'clock now, what time is it in {b} hours? | What is the average of {a}, {b} and {c}? |
List the first {c} multiples of {b}. | Write {c}/{bc} as a simplified fraction. | A car uses {c} liters of
fuel for 100 kilometers. How much does it use for {e} kilometers? | What is the square of {b}?
"""
)
WHO = split(
    """
my teacher | my boss | my neighbor | my sister | my best friend | a colleague | my landlord | a customer |
my uncle | my parents | the hotel | a new employee | my cousin | the school | my doctor | the city council |
an old friend | my team | the bank | a company
"""
)
WHAT = split(
    """
a thank-you note | an apology | an invitation | a short letter | a polite complaint | a get-well card | a
farewell message | a reminder | a request for help | a congratulation | a wedding wish | a text message | a
recommendation | a formal email | a funny message
"""
)
ABOUT = split(
    """
a late delivery | a new job | a broken window | a holiday trip | a lost key | a birthday party | a school
project | a wedding | a delayed payment | a new baby | a move to another city | a noisy party | a cancelled
appointment | a good meal | a book club | a charity event | an exam | a promotion | a garden party | a
mistake in a bill
"""
)
HOW = split(
    """
boil an egg | tie a tie | change a flat tire | cook rice | clean a window | write a resume | remove red wine
from a carpet | fix a dripping tap | plant a tree | wash a dog | sharpen a knife | iron a shirt | make
pancakes | bake a cake | make a paper boat | build a birdhouse | start a campfire | pack a suitcase | learn
to swim | learn to type faster | save money on groceries | fall asleep faster | wake up earlier | stop
procrastinating | prepare for an exam | prepare for a job interview | ask for a raise | make new friends |
apologize to a friend | train a puppy | choose a laptop | back up my photos | make a strong password | speed
up my computer | take better photos | write a short story | start a blog | start a podcast | learn French |
learn to cook | paint a wall | hang a picture | grow tomatoes | water house plants | remove ink from a shirt
| clean a keyboard | get rid of mice | keep bread fresh | store potatoes | make lemonade | brew green tea |
make a salad dressing | knit a scarf | sew a button | fold a shirt | wrap a gift | plan a wedding | plan a
road trip | find cheap flights | read a map | use a compass | stay warm in winter | run faster | lose weight
| gain muscle | improve my posture | stop biting my nails | drink more water | deal with stress | calm a
crying baby | teach a child to read | memorize a poem | give a speech | write a poem | draw a face | play
chess | juggle three balls | solve a Rubik's cube | whistle | make a kite | make slime | make a candle |
make soap | clean silver | remove gum from hair | open a jar | peel a mango | cut an onion without crying |
make pizza dough | cook pasta
"""
)
HOW_TEMPLATES = split(
    """
How do I {t}? | How can I {t}? | Give me step-by-step instructions to {t}. | What do I need to {t}? | What
is the best way to {t}? | I want to {t}. Any tips? | What mistakes should I avoid when I {t}?
"""
)
DISHES = split(
    """
tomato soup | pancakes | an omelette | banana bread | apple pie | lentil curry | fried rice | a Greek salad
| spaghetti with tomato sauce | chocolate cookies | chicken soup | guacamole | mashed potatoes | a fruit
smoothie | pizza | lasagna | a cheese sandwich | roasted carrots | pumpkin soup | onion soup | hummus | beef
stew | potato salad | rice pudding | burritos | fish tacos | garlic bread | noodle soup | scrambled eggs |
mushroom risotto
"""
)
DISH_TEMPLATES = split(
    """
Give me a recipe for {t}. | What ingredients do I need for {t}? | How do I make {t}? | Write a shopping list
for {t}. | How long does it take to make {t}?
"""
)
PHRASES = split(
    """
Good morning | How are you? | Where is the library? | I would like a cup of coffee | Thank you very much |
What time is it? | My name is Anna | The cat is on the table | I do not understand | How much does this
cost? | Where is the hospital? | I am hungry | See you tomorrow | The book is red | I love music | Can you
help me? | We are going to the park | It is raining | Happy birthday | I lost my passport | The food is very
good | Where is the airport? | She is my sister | I live in a small town | Do you speak English? | The water
is cold | Have a nice day
"""
)
LANGUAGES = split(
    """
German | French | Spanish | Italian | Portuguese | Dutch | Latin | Swedish | Polish | Japanese | Chinese |
Russian
"""
)
COUNTRY_QUESTIONS = split(
    """
What is the capital of {c}? | What language do people speak in {c}? | What food is {c} famous for? | Name
three cities in {c}. | Tell me a fun fact about {c}. | What is the currency of {c}? | Plan a three-day trip
to {c}. | Who is a famous person from {c}? | What is the history of {c}? | Is {c} a good place to live? |
What should I pack for a trip to {c}?
"""
)
COUNTRIES = split(
    """
France | Italy | Japan | Canada | Brazil | India | Mexico | Spain | Portugal | Greece | Sweden | Norway |
Finland | Poland | Austria | Hungary | Turkey | China | South Korea | Thailand | Vietnam | Australia | New
Zealand | Argentina | Chile | Peru | Colombia | Ireland | Scotland | the Netherlands | Belgium | Switzerland
| Denmark | Iceland | Russia | Indonesia | Cuba | Germany
"""
)
FOREIGN = split(
    """
¿Cuál es la capital de España? | Bonjour, comment ça va ? | Was ist die Hauptstadt von Deutschland? |
Escribe un cuento corto sobre un gato. | Écris un court poème sur la mer. | Erkläre mir die Schwerkraft in
einfachen Worten. | ¿Qué es la fotosíntesis? | Qu'est-ce que la gravité ? | Nenne fünf Tiere. | Dame tres
consejos para dormir mejor. | Donne-moi une recette de crêpes. | Come si dice 'good morning' in italiano? |
Qual é a capital do Brasil? | Scrivi una breve storia su un cane. | ¿Cómo se hace una tortilla? | Wie geht
es dir? | Raconte-moi une blague. | Explícame qué es un volcán. | Quels sont les jours de la semaine ? |
Schreibe einen kurzen Brief an einen Freund. | ¿Cuáles son los planetas del sistema solar? | Liste cinq
fruits.
"""
)
CHAT = split(
    """
How are you today? | What can you help me with? | I feel tired all the time. What should I do? | What is the
capital of Australia? | How many days are there in a leap year? | Suggest a name for my new puppy. | Write a
cover letter for a job as a cashier. | Plan a birthday party for a seven-year-old. | What is the difference
between a virus and a bacterium? | Write a product description for a backpack. | What is the meaning of
life? | How do airplanes stay in the air? | Recommend a movie for a family evening. | Write a slogan for a
coffee shop. | What is the best way to learn mathematics? | Write a limerick about a cat. | What causes the
seasons? | Who invented the telephone? | What is the largest ocean? | Write a diary entry of a sailor. |
Give me a workout plan for one week. | Who are you? | What is your name? | Hello! | Hi there | Good evening
| Thank you! | Tell me a joke. | Tell me a joke about cats. | Tell me a joke about school. | Tell me a joke
about doctors. | Tell me a riddle. | Tell me a bedtime story. | Tell me something interesting. | I am bored.
| I am sad today. | I am nervous about my exam. | I had a great day! | Can you sing? | Do you have feelings?
| Are you a human? | What day is it today? | What is love? | What is the fastest animal? | What is the
tallest mountain? | What is the longest river? | Who painted the Mona Lisa? | Who wrote Don Quixote, and
what is it about? | Who wrote Pride and Prejudice, and what is it about? | Who wrote Hamlet, and what is it
about? | Who wrote Moby Dick, and what is it about? | Who wrote Frankenstein, and what is it about? | Who
wrote The Hobbit, and what is it about? | Who wrote 1984, and what is it about? | Who discovered penicillin?
| Who was the first person in space? | When did World War II end? | When was the telephone invented? | Why
is the sea salty? | Why is grass green? | Why is snow white? | Why do leaves change color? | Why do cats
purr? | Why do we dream? | Why do we yawn? | Why do birds sing? | Why is blood red? | Why does ice float? |
Why do stars twinkle? | Why is the Sun hot? | How do fish breathe? | How do planes fly? | How does a
microwave work? | How does a refrigerator work? | How does a camera work? | How do vaccines work? | How do
plants drink? | How deep is the ocean? | How old is the Earth? | How far away is the Moon? | How many bones
does a human have? | How many continents are there? | How many planets are there? | How many legs does a
spider have? | What are the five senses? | What are the primary colors? | What are the three branches of
government? | What are the four seasons? | What are the seven continents? | What are the parts of a plant? |
What are the layers of the Earth? | What are the phases of the Moon? | What is the difference between a
fruit and a vegetable? | What is the difference between a lake and a sea? | What is the difference between a
crocodile and an alligator? | What is the difference between mass and weight? | What is the difference
between speed and velocity? | What is the difference between a simile and a metaphor? | What is the
difference between a novel and a short story? | What is the difference between 'affect' and 'effect'? | What
is the difference between 'their' and 'there'? | Use the word 'curious' in a sentence. | Use the word
'although' in three sentences. | Write a sentence with five words. | Write a sentence that uses every
letter. | Spell the word 'necessary'. | What is the plural of 'mouse'? | What is the opposite of 'generous'?
| What rhymes with 'moon'? | Correct this sentence: He go to school yesterday. | Correct this sentence: She
don't like apples. | Correct this sentence: Me and him was late. | Is this sentence correct? I has a dog. |
Write three words that start with B. | Count from 1 to 20. | Count down from 10. | Write the alphabet. |
Write the months of the year. | Write the days of the week in French. | Say hello in five languages. | Write
a story that starts with 'Once upon a time'. | Write a story about a dragon and a princess. | Write a story
about a robot who wants to be a chef. | Write a story about two brothers. | Write a story with a surprising
end. | Write a scene in a restaurant. | Write a monologue of a tired king. | Write a love letter. | Write a
poem about rain. | Write a poem about winter. | Write a poem about my mother. | Write a poem that rhymes. |
Write a sonnet about time. | Write a free verse about the city. | Write lyrics for a sad song. | Write a
movie plot about a lost city. | Write a character description of an old wizard. | Describe a sunset. |
Describe a busy market. | Describe your perfect day. | Describe a forest at night. | Write an advertisement
for a bookstore. | Write a job advertisement for a nurse. | Write a press release about a new phone. | Write
a mission statement for a school. | Write meeting notes. | Write an agenda for a team meeting. | Write a
to-do list for Monday. | Write a daily schedule for a student. | Write a packing list for a camping trip. |
Write a budget for a family of four. | Write a study plan for a history exam. | Write a training plan for a
5 km run. | Write a meal plan for three days. | Write a menu for a small restaurant. | Write house rules for
a shared flat. | Write an FAQ for an online shop. | Write terms for a loan between friends. | Write a short
biography of a scientist. | Write a eulogy for a goldfish. | Pretend you are a pirate and greet me. | Act as
a travel guide for Rome. | Act as a job interviewer and ask me three questions. | Act as a doctor and
explain a fever. | Let's play a word game. | Give me a writing prompt. | Give me a conversation starter. |
Give me a compliment. | Give me a motivational quote. | Give me advice for my first day at work. | Give me
ideas for a science project. | Give me three reasons to exercise. | Give me a synonym for 'quick'. | Answer
with yes or no: is the Earth flat? | Answer in one word: what color is grass? | Answer in one sentence: what
is a star? | Return only JSON: the name and capital of three countries. | Return only a number: how many
minutes are in an hour? | Classify these as animal or plant: oak, dog, rose, eagle. | Sort these numbers: 5,
2, 9, 1. | Sort these words: pear, apple, fig, lemon. | Which word does not fit: apple, banana, carrot,
cherry? | Translate 'good luck' into five languages. | If all cats are animals and Tom is a cat, is Tom an
animal? Explain. | A is taller than B and B is taller than C. Who is the shortest? | What weighs more, a
kilo of feathers or a kilo of iron? | What would you do with a million dollars? | What makes a good friend?
| What makes a good teacher? | Should children have phones? | Is it better to live in a city or in a
village? | Should homework be banned? | Are zoos good or bad? | Is money important for happiness? | Cats or
dogs? | Summer or winter? | Tea or coffee? | Write arguments for and against school uniforms. | Write
arguments for and against working from home. | Write arguments for and against video games. | Write
arguments for and against nuclear power.
"""
)
OPINIONS = split(
    """It works very well and looks great.|It broke after two weeks.|It is smaller than I expected.|
The color is different from the picture.|My family uses it every day."""
)
OUTCOMES = split(
    """The price was fair.|The delivery took three weeks.|Customer service did not answer my emails.|
I would buy it again.|I want my money back.|I gave it to a friend."""
)
THINGS = split("the report|your laptop|the budget|two copies of the contract|some ideas")
OWNED = split("business|roof|old car|garden|shop")
TROUBLE = split("failed|had to be repaired|was sold|burned down")
LETTERS = split(
    """Write {w} to {x} about {a}.|Can you help me write {w} for {x}? It is about {a}.|
Write {w} to {x} that mentions {a}. Keep it short."""
)


def passage(r: random.Random) -> str:
    """A short made-up text to summarise, translate, rewrite and so on."""
    p, q = r.sample(PEOPLE, 2)
    month, day, year = r.choice(MONTHS), r.choice(DAYS), r.randint(1950, 2024)
    kind = r.randrange(7)
    if kind == 0:
        return (
            f"{p}, a {r.choice(JOBS)}, found {r.choice(FINDS)} in {r.choice(PLACES)}. {q} {r.choice(THEN)}, "
            f"while {p} only watched. {r.choice(ENDS)}"
        )
    if kind == 1:
        return (
            f"{r.choice(EVENTS).capitalize()} takes place on {day}, {month} {r.randint(1, 28)}, at "
            f"{r.choice(PLACES)}. It begins at {r.randint(8, 11)} in the morning and ends at "
            f"{r.randint(2, 6)} in the afternoon. {p} will give a short talk. "
            f"Tickets cost {r.randint(3, 40)} dollars."
        )
    if kind == 2:
        return f"I bought this {r.choice(PRODUCTS)} in {month}. {r.choice(OPINIONS)} {r.choice(OUTCOMES)}"
    if kind == 3:
        return (
            f"Dear {p}, thank you for your message. The meeting about {r.choice(EVENTS)} was moved to {day} "
            f"at {r.randint(8, 12)}:{r.choice(['00', '15', '30'])}. Please bring {r.choice(THINGS)}. "
            f"Best regards, {q}"
        )
    if kind == 4:
        return (
            f"{p} was born in {r.choice(PLACES)} in {year}. As a {r.choice(JOBS)}, {p} worked for "
            f"{r.randint(3, 40)} years. {q} helped when the {r.choice(OWNED)} {r.choice(TROUBLE)}. "
            f"{r.choice(ENDS)}"
        )
    if kind == 5:
        return r.choice(FACTS) if r.random() < 0.5 else " ".join(r.sample(FACTS, 2))
    return r.choice(STORIES)


def maths(r: random.Random) -> str:
    """A small calculation or word problem."""
    a, b, c = r.randint(3, 90), r.randint(2, 14), r.randint(2, 9)
    n, m = r.sample(PEOPLE, 2)
    form, item = r.choice(FORMS), r.choice(ITEMS)
    return form.format(
        n=n,
        m=m,
        it=item,
        a=a,
        b=b,
        c=c,
        bc=b * c,
        d=b * a + c,
        p=5 * r.randint(1, 15),
        e=r.randint(50, 900),
        b2=2 * b,
        b3=3 * b,
    )


def topic_prompt(r: random.Random) -> str:
    """A request about one or two topics."""
    t, u = r.sample(TOPICS, 2)
    return r.choice(TOPIC_TEMPLATES if r.random() < 0.68 else MORE_TEMPLATES).format(t=t, u=u)


def chat_prompt(r: random.Random) -> str:
    """Small talk, how-to, recipes, phrases to translate, countries, letters."""
    x = r.random()
    if x < 0.34:
        return r.choice(CHAT)
    if x < 0.54:
        return r.choice(HOW_TEMPLATES).format(t=r.choice(HOW))
    if x < 0.64:
        return r.choice(DISH_TEMPLATES).format(t=r.choice(DISHES))
    if x < 0.72:
        return f"Translate '{r.choice(PHRASES)}' into {r.choice(LANGUAGES)}."
    if x < 0.82:
        return r.choice(COUNTRY_QUESTIONS).format(c=r.choice(COUNTRIES))
    if x < 0.84:
        return r.choice(FOREIGN)
    return r.choice(LETTERS).format(w=r.choice(WHAT), x=r.choice(WHO), a=r.choice(ABOUT))


def code_prompt(r: random.Random) -> str:
    """A programming request."""
    if r.random() < 0.2:
        return r.choice(CODE_CHAT)
    return r.choice(CODE_TEMPLATES[:6] if r.random() < 0.6 else CODE_TEMPLATES).format(t=r.choice(CODE_TASKS))


def list_prompt(r: random.Random) -> str:
    """A request for a list, table, JSON array and so on."""
    return r.choice(LIST_TEMPLATES[:5] if r.random() < 0.6 else LIST_TEMPLATES).format(t=r.choice(LISTS))


def passage_prompt(r: random.Random) -> str:
    """A task on a given text."""
    template = r.choice(PASSAGE_TEMPLATES[:14] if r.random() < 0.6 else PASSAGE_TEMPLATES)
    return template.format(t=passage(r))


def build_prompts(seed: int, count: int) -> list[dict[str, str]]:
    """`count` different prompts (fewer when the templates run out), none with a word of a held-out topic."""
    r = random.Random(seed)
    makers: dict[str, tuple[Callable[[random.Random], str], float]] = {
        "topic": (topic_prompt, 0.45),
        "code": (code_prompt, 0.11),
        "list": (list_prompt, 0.10),
        "passage": (passage_prompt, 0.13),
        "chat": (chat_prompt, 0.16),
        "maths": (maths, 0.05),
    }
    shares = [share for _, share in makers.values()]
    seen: set[str] = set()
    rows: list[dict[str, str]] = []
    for _ in range(50 * count):
        if len(rows) == count:
            break
        kind = r.choices(list(makers), shares)[0]
        prompt = makers[kind][0](r)
        if prompt in seen or HELD_OUT_WORDS.search(prompt):
            continue
        seen.add(prompt)
        row = {"kind": kind, "prompt": prompt}
        if kind != "maths" and r.random() < 0.08:
            row["follow_up"] = r.choice(FOLLOW_UPS)
        rows.append(row)
    return rows


def cmd_prompts(args: argparse.Namespace) -> None:
    """Write training prompts (templates x topics) that share nothing with the held-out prompts."""
    held = {json.loads(line)["prompt"] for line in args.held_out.read_text().splitlines()}
    rows = build_prompts(args.seed, args.count)
    if held & {row["prompt"] for row in rows}:
        raise SystemExit("a held-out prompt is among the training prompts")
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(len(rows), dict(Counter(row["kind"] for row in rows)))


# ---------------------------------------------------------------------------------------------- target model
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each (length, dim), for rotate-half rotary embedding."""
    angle = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, dim, 2).float() / dim))
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x (..., dim); cos and sin broadcast against it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def attention_inputs(
    x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, eps: float, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, H) fp32 -> rotated q (N, heads, D), rotated k and plain v (N, kv_heads, D) in the type of `qkv`."""
    y = F.linear(rms_norm(x, norm, eps).to(qkv.dtype), qkv).view(x.shape[0], heads + 2 * kv_heads, -1)
    q, k, v = y.split([heads, kv_heads, kv_heads], 1)
    return rotate(q.float(), cos, sin).to(qkv.dtype), rotate(k.float(), cos, sin).to(qkv.dtype), v


def finish_layer(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Residual stream (N, H) fp32 after the output projection and the MLP of a layer."""
    x = x + F.linear(attended, o).float()
    gate, up = F.linear(rms_norm(x, norm, eps).to(o.dtype), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down).float()


class TargetModel:
    """A small Llama with a slotted KV cache; matrix products in `dtype`, the residual stream in fp32."""

    GROUP = 32  # slots that share one attention call, so that short rows do not wait for the longest of all

    def __init__(self, folder: Path, slots: int, max_len: int, dtype: torch.dtype, fuse: bool) -> None:
        self.config = c = json.loads((folder / "config.json").read_text())
        w = load_file(folder / "model.safetensors")
        self.dtype, self.eps, self.hidden = dtype, c["rms_norm_eps"], c["hidden_size"]
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        depth = c["num_hidden_layers"]
        self.taps = aux_layers(depth)
        self.cos, self.sin = rope_tables(max_len, self.dim, c["rope_theta"])
        self.embed = w["model.embed_tokens.weight"].float()
        self.norm = w["model.norm.weight"].float()
        self.unembed = w.get("lm_head.weight", self.embed).float()
        self.unembed_fast = self.unembed.to(dtype)
        self.layers = []
        for i in range(depth):
            part = {
                k.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): v.float()
                for k, v in w.items()
                if k.startswith(f"model.layers.{i}.")
            }
            self.layers.append(
                (
                    part["input_layernorm"],
                    torch.cat([part[f"self_attn.{n}_proj"] for n in "qkv"]).to(dtype),
                    part["self_attn.o_proj"].to(dtype),
                    part["post_attention_layernorm"],
                    torch.cat([part["mlp.gate_proj"], part["mlp.up_proj"]]).to(dtype),
                    part["mlp.down_proj"].to(dtype),
                )
            )
        shape = (depth, slots, self.kv_heads, max_len, self.dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        compiled = (lambda f: torch.compile(f, dynamic=False)) if fuse else (lambda f: f)
        self.step_inputs, self.step_finish = compiled(attention_inputs), compiled(finish_layer)

    def prefill(self, ids: Tensor, rows: Tensor, pos: Tensor) -> Tensor:
        """Process ids (B, S) at positions pos (B, S) of cache rows `rows` (B,).

        Returns (B, S, 4, H): the three auxiliary states and the normalised final hidden state.
        """
        B, S = ids.shape
        group, kv = self.heads // self.kv_heads, int(pos.max()) + 1
        cos, sin = self.cos[pos].view(B * S, 1, -1), self.sin[pos].view(B * S, 1, -1)
        mask = (torch.arange(kv) <= pos[:, :, None])[:, None, None]
        mask = mask.expand(B, 1, group, S, kv).reshape(B, 1, group * S, kv)
        x, taps = self.embed[ids].view(B * S, -1), []
        for i, (n1, qkv, o, n2, gate_up, down) in enumerate(self.layers):
            if i in self.taps:
                taps.append(x)
            q, k, v = attention_inputs(x, n1, qkv, cos, sin, self.eps, self.heads, self.kv_heads)
            self.keys[i][rows[:, None], :, pos] = k.view(B, S, self.kv_heads, -1)
            self.values[i][rows[:, None], :, pos] = v.view(B, S, self.kv_heads, -1)
            q = q.view(B, S, self.kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(B, self.kv_heads, group * S, -1)
            a = F.scaled_dot_product_attention(
                q, self.keys[i][rows, :, :kv], self.values[i][rows, :, :kv], attn_mask=mask
            )
            a = a.view(B, self.kv_heads, group, S, -1).permute(0, 3, 1, 2, 4).reshape(B * S, -1)
            x = finish_layer(x, a, o, n2, gate_up, down, self.eps)
        return torch.stack([*taps, rms_norm(x, self.norm, self.eps)], 1).view(B, S, 4, -1)

    def decode(self, ids: Tensor, pos: Tensor) -> Tensor:
        """Process one token of every slot: ids and pos (slots,) -> (slots, 4, H) as in `prefill`."""
        B, group = len(ids), self.heads // self.kv_heads
        cos, sin, at = self.cos[pos][:, None], self.sin[pos][:, None], torch.arange(len(ids))
        spans = []
        for lo in range(0, B, self.GROUP):
            own = pos[lo : lo + self.GROUP]
            kv = int(own.max()) + 1
            mask = torch.zeros(len(own), 1, 1, kv, dtype=self.dtype)
            mask.masked_fill_((torch.arange(kv) > own[:, None])[:, None, None], -torch.inf)
            spans.append((slice(lo, lo + len(own)), kv, mask.expand(-1, self.kv_heads, group, -1)))
        out = torch.empty(B, self.kv_heads, group, self.dim, dtype=self.dtype)
        x, taps = self.embed[ids], []
        for i, (n1, qkv, o, n2, gate_up, down) in enumerate(self.layers):
            if i in self.taps:
                taps.append(x)
            q, k, v = self.step_inputs(x, n1, qkv, cos, sin, self.eps, self.heads, self.kv_heads)
            self.keys[i][at, :, pos], self.values[i][at, :, pos] = k, v
            q = q.view(B, self.kv_heads, group, self.dim)
            for rows, kv, mask in spans:
                out[rows] = F.scaled_dot_product_attention(
                    q[rows], self.keys[i, rows, :, :kv], self.values[i, rows, :, :kv], attn_mask=mask
                )
            x = self.step_finish(x, out.view(B, -1), o, n2, gate_up, down, self.eps)
        return torch.stack([*taps, rms_norm(x, self.norm, self.eps)], 1)

    def choose(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """Next token ids (B,) of final hidden states (B, H); temperature (B,), 0 means greedy.

        Coarse logits find the candidates; fp32 dot products decide between them (bf16 logits tie often).
        """
        logits = F.linear(hidden.to(self.dtype), self.unembed_fast)
        best = logits.max(-1, keepdim=True).values.float()
        row, col = (logits >= (best - 0.02 * best.abs() - 0.05).to(logits.dtype)).nonzero(as_tuple=True)
        exact = (hidden[row] * self.unembed[col]).sum(-1)
        top = torch.full((len(hidden),), -torch.inf).scatter_reduce(0, row, exact, "amax")
        keep = exact == top[row]
        out = torch.zeros(len(hidden), dtype=torch.long)
        out[row[keep]] = col[keep]
        hot = (temperature > 0).nonzero().squeeze(1)
        if len(hot):
            mass = torch.softmax(logits[hot].float() / temperature[hot, None], -1).cumsum(-1)
            drawn = torch.searchsorted(mass, torch.rand(len(hot), 1) * mass[:, -1:]).squeeze(1)
            out[hot] = drawn.clamp(max=logits.shape[1] - 1)
        return out


def aux_layers(depth: int) -> tuple[int, int, int]:
    """Layers whose *input* residual streams feed the head (vLLM's default choice)."""
    return 2, depth // 2, depth - 3


# -------------------------------------------------------------------------------------------------- generate
class Answers:
    """Append-only store: features.bin (positions, 4, H) fp16 and index.jsonl, one line an answer."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.blob = (folder / "features.bin").open("wb")
        self.index = (folder / "index.jsonl").open("w")
        self.positions = self.count = 0

    def add(self, feats: Tensor, tokens: list[int], prompt_len: int, kind: str, greedy: bool) -> None:
        """Store one conversation; feats is (len(tokens), 4, H) fp16."""
        self.blob.write(feats.numpy().tobytes())
        row = {
            "offset": self.positions,
            "prompt_len": prompt_len,
            "kind": kind,
            "greedy": greedy,
            "tokens": tokens,
        }
        self.index.write(json.dumps(row) + "\n")
        self.positions += len(tokens)
        self.count += 1

    def flush(self) -> None:
        """Make what was added visible to readers."""
        self.blob.flush()
        self.index.flush()


@dataclass
class Slot:
    """One conversation that is being answered."""

    tokens: list[int]
    prompt_len: int
    kind: str
    messages: list[dict[str, str]]
    follow_up: str | None
    greedy: bool
    max_new: int


@torch.inference_mode()
def cmd_generate(args: argparse.Namespace) -> None:
    """Let the target answer prompts with continuous batching and store tokens and features."""
    from transformers import AutoTokenizer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)

    def encode(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    queue = []
    for row in rows[args.skip :][args.shard[0] :: args.shard[1]]:
        messages = [{"role": "user", "content": row["prompt"]}]
        ids = encode(messages)
        if len(ids) + 60 < args.max_len:
            queue.append((ids, messages, row.get("kind", ""), row.get("follow_up")))
    probe = [encode([{"role": "user", "content": text}]) for text in ("a", "1")]
    shared = next(i for i, pair in enumerate(zip(*probe, strict=False)) if pair[0] != pair[1])

    slots, max_len = min(args.slots, len(queue)), args.max_len
    model = TargetModel(args.target, slots, max_len, getattr(torch, args.dtype), not args.no_compile)
    eos = model.config["eos_token_id"]
    feats = torch.zeros(slots, max_len, 4, model.hidden, dtype=torch.float16)

    def half(x: Tensor) -> Tensor:
        return x.clamp(-6e4, 6e4).half()

    prefix = model.prefill(torch.tensor([queue[0][0][:shared]]), torch.tensor([0]), torch.arange(shared)[None])
    feats[:, :shared] = half(prefix)
    for cache in (model.keys, model.values):  # the system prompt is the same in every row
        cache[:, :, :, :shared] = cache[:, :1, :, :shared].clone()
    live: list[Slot | None] = [None] * slots
    length = torch.full((slots,), shared)  # processed tokens of each row
    pending = torch.zeros(slots, dtype=torch.long)  # chosen, not yet processed
    temperature = torch.zeros(slots)
    store, made, cursor, extra = Answers(args.out), 0, 0, []
    begun = reported = time.time()
    while True:
        exhausted = cursor >= len(queue) and not extra
        busy = sum(slot is not None for slot in live)
        if (args.minutes and time.time() - begun > 60 * args.minutes) or (exhausted and not busy):
            break
        for lo in range(0, slots, model.GROUP):
            free = [r for r in range(lo, min(slots, lo + model.GROUP)) if live[r] is None]
            if exhausted or len(free) < min(args.refill, slots - lo):
                continue
            batch = []
            while len(batch) < len(free) and (extra or cursor < len(queue)):
                if extra:
                    batch.append(extra.pop())
                else:
                    batch.append(queue[cursor])
                    cursor += 1
            batch.sort(key=lambda item: len(item[0]))
            for first in range(0, len(batch), 8):
                part = batch[first : first + 8]
                at = torch.tensor(free[first : first + len(part)])
                width = max(len(item[0]) for item in part)
                ids = torch.tensor([item[0][shared:] + [0] * (width - len(item[0])) for item in part])
                out = model.prefill(ids, at, torch.arange(shared, width).expand(len(part), -1))
                feats[at, shared:width] = half(out)
                for row, (tokens, messages, kind, follow_up) in zip(at.tolist(), part, strict=True):
                    greedy = args.temperature <= 0 or rng.random() < args.greedy_share
                    temperature[row] = 0.0 if greedy else args.temperature
                    limit = min(rng.choice(args.max_new), max_len - len(tokens))
                    live[row] = Slot(list(tokens), len(tokens), kind, messages, follow_up, greedy, limit)
                    length[row] = len(tokens)
                last = out[torch.arange(len(part)), length[at] - shared - 1, 3]
                pending[at] = model.choose(last, temperature[at])
            exhausted = cursor >= len(queue) and not extra
        out = model.decode(pending, length)
        feats[torch.arange(slots), length] = half(out)
        following = model.choose(out[:, 3], temperature)
        for r, (slot, token) in enumerate(zip(live, pending.tolist(), strict=True)):
            if slot is None:
                continue
            slot.tokens.append(token)
            length[r] += 1
            made += 1
            if token != eos and len(slot.tokens) - slot.prompt_len < slot.max_new:
                continue
            store.add(feats[r, : len(slot.tokens)], slot.tokens, slot.prompt_len, slot.kind, slot.greedy)
            if slot.follow_up and token == eos:
                answer = tokenizer.decode(slot.tokens[slot.prompt_len : -1])
                messages = [
                    *slot.messages,
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": slot.follow_up},
                ]
                ids = encode(messages)
                if len(ids) + 60 < max_len:
                    extra.append((ids, messages, "follow", None))
            live[r], length[r], following[r], temperature[r] = None, shared, 0, 0.0
        pending = following
        if time.time() - reported > 30:
            reported = time.time()
            store.flush()
            print(
                f"{reported - begun:.0f} s: {store.count} answers, {made} tokens "
                f"({made / (reported - begun):.0f}/s), prompt {cursor} of {len(queue)}",
                flush=True,
            )
    store.flush()
    print(f"{store.count} answers, {made} answer tokens, {time.time() - begun:.0f} s", flush=True)


class Corpus:
    """Stored conversations of one or more folders that `generate` wrote; features stay on disk."""

    def __init__(self, folders: list[Path], hidden: int) -> None:
        self.rows: list[dict] = []
        self.blobs: list[np.ndarray] = []
        for folder in folders:
            blob = np.memmap(folder / "features.bin", dtype=np.float16, mode="r")
            self.blobs.append(blob[: len(blob) // (4 * hidden) * 4 * hidden].reshape(-1, 4, hidden))
            for line in (folder / "index.jsonl").read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a run that was stopped
                    continue
                if row["offset"] + len(row["tokens"]) <= len(self.blobs[-1]):
                    self.rows.append(row | {"blob": len(self.blobs) - 1})

    def features(self, row: dict) -> Tensor:
        """(tokens, 4, H) fp16: three auxiliary states and the final hidden state."""
        blob = self.blobs[row["blob"]]
        return torch.from_numpy(np.array(blob[row["offset"] : row["offset"] + len(row["tokens"])]))

    def batch(self, rows: list[dict]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Right-padded tokens (B, T) and features (B, T, 4, H), lengths (B,), first base positions (B,)."""
        width = max(len(row["tokens"]) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        feats = torch.zeros(len(rows), width, 4, self.blobs[0].shape[-1])
        for i, row in enumerate(rows):
            tokens[i, : len(row["tokens"])] = torch.tensor(row["tokens"])
            feats[i, : len(row["tokens"])] = self.features(row)
        length = torch.tensor([len(row["tokens"]) for row in rows])
        return tokens, feats, length, torch.tensor([row["prompt_len"] - 1 for row in rows])


def answer_tokens(rows: list[dict]) -> Tensor:
    """All answer tokens of the rows, (N,)."""
    return torch.tensor([token for row in rows for token in row["tokens"][row["prompt_len"] :]])


# ------------------------------------------------------------------------------------------------ draft head
class DraftHead(torch.nn.Module):
    """EAGLE-3 head for training.

    `fc` works on auxiliary states divided by their standard deviation; `export` folds that factor in.
    Master weights are fp32, matrix products run in `compute`.
    """

    NAMES: ClassVar[dict[str, str]] = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "norm_hidden": "hidden_norm",
        "norm_embed": "input_layernorm",
        "norm_post": "post_attention_layernorm",
    }

    def __init__(self, config: dict, intermediate: int, draft_ids: Tensor, max_len: int) -> None:
        super().__init__()
        self.config, self.eps, self.compute = config, config["rms_norm_eps"], torch.bfloat16
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, H = config["head_dim"], config["hidden_size"]
        cos, sin = rope_tables(max_len, self.dim, config["rope_theta"])
        constants = {
            "cos": cos,
            "sin": sin,
            "draft_ids": draft_ids,
            "inv_std": torch.ones(3 * H),
            "embed": torch.zeros(config["vocab_size"], H),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)
        kv, q = self.kv_heads * self.dim, self.heads * self.dim
        shapes = {
            "fc": (H, 3 * H),
            "q": (q, 2 * H),
            "k": (kv, 2 * H),
            "v": (kv, 2 * H),
            "o": (H, q),
            "gate": (intermediate, H),
            "up": (intermediate, H),
            "down": (H, intermediate),
            "norm_embed": (H,),
            "norm_hidden": (H,),
            "norm_post": (H,),
            "norm_out": (H,),
            "lm_head": (len(draft_ids), H),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    @torch.no_grad()
    def warm_start(self, target: dict[str, Tensor], inv_std: Tensor) -> None:
        """Start from the target's own weights.

        Attention and MLP come from the last layer (the embedding half of q/k/v from the first one), the
        output rows from the target's, and `fc` passes the last auxiliary state on at about unit size.
        """
        H = self.config["hidden_size"]
        first, last = "model.layers.0.", f"model.layers.{self.config['num_hidden_layers'] - 1}."
        self.embed.copy_(target["model.embed_tokens.weight"])
        self.inv_std.copy_(inv_std)
        std = 1 / inv_std[2 * H :]
        size = 1 / std.square().mean().sqrt()
        self.fc.copy_(torch.randn(self.fc.shape) * 0.01)
        self.fc[:, 2 * H :] += torch.diag(std * size)
        for name in "qkv":
            key = f"self_attn.{name}_proj.weight"
            scale = 0.3 if name == "v" else 1.0
            getattr(self, name).copy_(torch.cat([target[first + key] * scale, target[last + key]], 1))
        inner = len(self.gate)
        self.o.copy_(target[last + "self_attn.o_proj.weight"] * size)
        self.gate.copy_(target[last + "mlp.gate_proj.weight"][:inner])
        self.up.copy_(target[last + "mlp.up_proj.weight"][:inner])
        self.down.copy_(target[last + "mlp.down_proj.weight"][:, :inner] * size)
        self.norm_embed.copy_(target[first + "input_layernorm.weight"])
        self.norm_hidden.copy_(target[last + "input_layernorm.weight"])
        self.norm_post.copy_(target[last + "post_attention_layernorm.weight"])
        self.norm_out.copy_(target["model.norm.weight"])
        self.lm_head.copy_(target.get("lm_head.weight", self.embed)[self.draft_ids])

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix product in the compute type."""
        return F.linear(x.to(self.compute), weight.to(self.compute))

    def attend_to(self, ids: Tensor, hidden: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer input (B, S, 2H), rotated keys and values (B, kv_heads, S, D) for tokens at `pos` (B, S)."""
        B, S = ids.shape
        x = torch.cat(
            [
                rms_norm(self.embed[ids], self.norm_embed, self.eps),
                rms_norm(hidden, self.norm_hidden, self.eps),
            ],
            -1,
        ).to(self.compute)
        k = self.linear(x, self.k).view(B, S, self.kv_heads, self.dim).transpose(1, 2).float()
        k = rotate(k, self.cos[pos][:, None], self.sin[pos][:, None]).to(self.compute)
        return x, k, self.linear(x, self.v).view(B, S, self.kv_heads, self.dim).transpose(1, 2)

    def query(self, x: Tensor, pos: Tensor) -> Tensor:
        """Rotated queries (B, kv_heads, heads / kv_heads, S, D) of layer inputs x (B, S, 2H)."""
        B, S = pos.shape
        q = self.linear(x, self.q).view(B, S, self.heads, self.dim).transpose(1, 2).float()
        q = rotate(q, self.cos[pos][:, None], self.sin[pos][:, None]).to(self.compute)
        return q.view(B, self.kv_heads, self.heads // self.kv_heads, S, self.dim)

    def unroll(
        self, tokens: Tensor, aux: Tensor, base: Tensor, steps: int
    ) -> Generator[Tensor | None, Tensor | None, None]:
        """Training-time test: yield the pre-norm outputs (B, W, H) of draft steps 1..steps.

        tokens (B, T), aux (B, T, 3H), base (B, W): positions whose target state starts a draft.  Step j of
        base t reads token t + j and the previous output, at position t + j - 1; it sees the first-step keys
        up to t and its own branch.  Between steps the caller may `send` indices (B, W') of bases to keep.
        """
        B, T = tokens.shape
        fused = self.linear(aux * self.inv_std, self.fc).float()
        following = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        x, K, V = self.attend_to(following, fused, torch.arange(T).expand(B, T))
        hidden, q = take(fused, base), self.query(take(x, base), base)
        group, scale = self.heads // self.kv_heads, self.dim**-0.5
        branch: list[tuple[Tensor, Tensor]] = []
        for step in range(1, steps + 1):
            W = base.shape[1]
            if step > 1:
                pos = base + (step - 1)
                x, k, v = self.attend_to(torch.gather(tokens, 1, (base + step).clamp(max=T - 1)), hidden, pos)
                q = self.query(x, pos)
                branch.append((k, v))
            future = (torch.arange(T) > base[:, :, None])[:, None, None]
            score = (q.reshape(B, self.kv_heads, group * W, self.dim) @ K.transpose(-1, -2)).float() * scale
            parts = [score.view(B, self.kv_heads, group, W, T).masked_fill(future, -torch.inf)]
            parts += [(q * k[:, :, None]).float().sum(-1, keepdim=True) * scale for k, _ in branch]
            p = torch.softmax(torch.cat(parts, -1), -1).to(self.compute)
            mixed = (p[..., :T].reshape(B, self.kv_heads, group * W, T) @ V).view(q.shape)
            for i, (_, v) in enumerate(branch):
                mixed = mixed + p[..., T + i : T + i + 1] * v[:, :, None]
            y = hidden + self.linear(mixed.permute(0, 3, 1, 2, 4).reshape(B, W, -1), self.o).float()
            z = rms_norm(y, self.norm_post, self.eps).to(self.compute)
            hidden = y + self.linear(F.silu(self.linear(z, self.gate)) * self.linear(z, self.up), self.down).float()
            keep = yield hidden
            if keep is not None:
                hidden, base = take(hidden, keep), torch.gather(base, 1, keep)
                at = keep[:, None, :, None].expand(-1, self.kv_heads, -1, self.dim)
                branch = [(torch.gather(k, 2, at), torch.gather(v, 2, at)) for k, v in branch]
                yield None

    def readout(self, hidden: Tensor) -> Tensor:
        """Normalised outputs, ready for `lm_head`."""
        return rms_norm(hidden, self.norm_out, self.eps).to(self.compute)

    @torch.no_grad()
    def export(self, out: Path, state: dict[str, Tensor]) -> None:
        """Write model.safetensors (bf16) and config.json in vLLM's layout, replacing an old file at once."""
        c = self.config
        weights = {
            "fc.weight": state["fc"] * self.inv_std,
            "norm.weight": state["norm_out"],
            "lm_head.weight": state["lm_head"],
        }
        weights |= {f"midlayer.{name}.weight": state[own] for own, name in self.NAMES.items()}
        weights = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
        weights["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids))
        weights["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool).index_fill_(0, self.draft_ids, True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": len(self.gate),
            "draft_vocab_size": len(self.draft_ids),
            "rope_theta": c["rope_theta"],
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers(c["num_hidden_layers"])),
        }
        config |= {
            key: c[key]
            for key in (
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "hidden_act",
                "vocab_size",
                "max_position_embeddings",
                "bos_token_id",
                "eos_token_id",
                "pad_token_id",
                "rms_norm_eps",
            )
        }
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config)
        save_file(weights, out / "model.safetensors.new", metadata={"format": "pt"})
        (out / "model.safetensors.new").replace(out / "model.safetensors")


def take(x: Tensor, at: Tensor) -> Tensor:
    """Rows x[b, at[b, w]] of x (B, S, C) as (B, W, C)."""
    return torch.gather(x, 1, at[:, :, None].expand(-1, -1, x.shape[-1]))


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted cross entropy against soft labels over the candidates of a batch.

    `offset` is log(1 / inclusion probability) of a candidate, so the candidates' sum estimates the full
    softmax.  Chunked, so that the fp32 logits stay in the cache.
    """

    CHUNK = 128

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, labels: Tensor, rows: Tensor, weight: Tensor, offset: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x (M, H), w and offset (C, H), (C,); labels (N, C), rows (M,) into labels, weight (M,).

        Returns the loss and the candidate with the largest plain logit (M,).
        """
        M, V = len(x), len(w)
        grad = torch.empty(M, V, dtype=x.dtype)
        top, loss = torch.empty(M, dtype=torch.long), 0.0
        buffer = torch.empty(SoftCrossEntropy.CHUNK, V)
        for lo in range(0, M, SoftCrossEntropy.CHUNK):
            part = slice(lo, min(M, lo + SoftCrossEntropy.CHUNK))
            z, share = buffer[: part.stop - lo], weight[part, None]
            z.copy_(x[part] @ w.t())
            p = labels[rows[part]].float()
            peak, top[part] = z.max(-1)
            z.sub_(peak[:, None]).add_(offset)
            expected = torch.einsum("mv,mv->m", p, z)
            z.exp_()
            total = z.sum(-1, keepdim=True)
            loss += float(((total.squeeze(1).log() - expected) * weight[part]).sum())
            grad[part] = z.mul_(share / total).addcmul_(p, share, value=-1.0)
        ctx.save_for_backward(grad @ w, grad.t() @ x)
        return torch.tensor(loss), top

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and w."""
        dx, dw = ctx.saved_tensors
        return dx * upstream, dw * upstream, None, None, None, None


# -------------------------------------------------------------------------------------------------- training
def choose_draft_vocabulary(rows: list[dict], target: Path, vocab: int, size: int, shared: int = 24) -> Tensor:
    """Sorted ids (size,) of the commonest answer tokens; single characters and control tokens always stay.

    Prompt tokens after the `shared` system prompt count a fifth.
    """
    count = np.zeros(vocab)
    for row in rows:
        count += np.bincount(row["tokens"][row["prompt_len"] :], minlength=vocab)
        count += 0.2 * np.bincount(row["tokens"][shared : row["prompt_len"]], minlength=vocab)
    pieces = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
    for piece, i in pieces.items():
        if i < CONTROL_TOKENS or (len(piece) == 1 and piece.isascii()):
            count[i] += 1e6
        elif len(piece) == 1:  # other bytes only win ties
            count[i] += 3
    return torch.from_numpy(np.sort(np.argsort(-count, kind="stable")[:size])).long()


@torch.no_grad()
def walk(head: DraftHead, corpus: Corpus, steps: int, k: int) -> tuple[list[float], float]:
    """Acceptance of a simulated greedy decode with k drafts a round, all bases computed at once.

    Returns p_1..p_steps (position j accepted, given as a share of rounds) and the acceptance length at k.
    """
    hits, rounds = torch.zeros(steps), 0
    order = sorted(corpus.rows, key=lambda row: len(row["tokens"]) - row["prompt_len"])
    out_rows = head.lm_head.to(head.compute).t()
    for lo in range(0, len(order), 16):
        tokens, feats, length, start = corpus.batch(order[lo : lo + 16])
        T, usable = tokens.shape[1], length - start - 1 - steps
        width = int(usable.max())
        if width < 1:
            continue
        base = (start[:, None] + torch.arange(width)).clamp(max=T - 1)
        alive, found = torch.ones(base.shape, dtype=torch.bool), []
        for step, hidden in enumerate(head.unroll(tokens, feats[:, :, :3].flatten(2), base, steps), 1):
            draft = head.draft_ids[(head.readout(hidden) @ out_rows).argmax(-1)]
            alive = alive & (draft == torch.gather(tokens, 1, (base + 1 + step).clamp(max=T - 1)))
            found.append(alive)
        accepted = torch.stack(found, -1)
        for row, limit in zip(accepted, usable.tolist(), strict=True):
            at = 0
            while at < limit:
                hits, rounds = hits + row[at], rounds + 1
                at += 1 + int(row[at, :k].sum())
    p = hits / rounds
    return [round(x, 4) for x in p.tolist()], round(1 + float(p[:k].sum()), 4)


def batches(rows: list[dict], size: int, seed: int) -> list[list[dict]]:
    """One shuffled pass over the rows in batches of similar answer length."""
    rng = random.Random(seed)
    order, out = rng.sample(rows, len(rows)), []
    for lo in range(0, len(order), 16 * size):
        window = sorted(order[lo : lo + 16 * size], key=lambda row: len(row["tokens"]) - row["prompt_len"])
        out += [window[i : i + size] for i in range(0, len(window), size)]
    rng.shuffle(out)
    return out


def unrolled_loss(
    head: DraftHead,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    target_rows: Tensor,
    to_draft: Tensor,
    args: argparse.Namespace,
) -> tuple[Tensor, Tensor, int]:
    """Loss of one batch, bases accepted at each step (steps,), and the number of bases.

    After every step only the bases whose drafts all matched and a random part of the others go on, so later
    steps learn mostly where they are used.  target_rows (V, H) are the target's output rows of the draft
    vocabulary, to_draft (vocab,) maps token ids to draft ids or -1.
    """
    tokens, feats, length, start = batch
    B, T = tokens.shape
    width = int((length - start).max()) - 2
    raw = start[:, None] + torch.arange(width)
    base, inside = raw.clamp(max=T - 1), raw + 2 < length[:, None]
    following = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
    every = torch.arange(T)
    known = (to_draft[following] >= 0) & (every + 1 < length[:, None]) & (every > start[:, None])
    at = known.flatten().nonzero().squeeze(1)
    row_of = torch.full((B * T,), -1)
    row_of[at] = torch.arange(len(at))
    row_of = row_of.view(B, T)
    logits = F.linear(feats[:, :, 3].reshape(B * T, -1)[at].to(torch.bfloat16), target_rows).float()
    labels = torch.softmax(logits / args.label_temperature, -1)
    forced = labels.amax(0) > args.candidate_floor
    chance = min(1.0, args.negatives / max(1, int((~forced).sum())))
    candidates = (forced | (torch.rand(len(forced)) < chance)).nonzero().squeeze(1)
    offset = torch.where(forced[candidates], 0.0, -math.log(max(chance, 1e-9)))
    labels = labels[:, candidates]
    labels = (labels / labels.sum(-1, keepdim=True)).to(torch.bfloat16)
    total, out_rows = torch.zeros(()), head.lm_head[candidates].to(head.compute)
    accepted, bases = torch.zeros(args.steps), int(inside.sum())
    share = [w / sum(args.step_weights[: args.steps]) for w in args.step_weights[: args.steps]]
    alive = torch.ones_like(inside)
    drafts = head.unroll(tokens, feats[:, :, :3].flatten(2), base, args.steps)
    for step in range(1, args.steps + 1):
        hidden = next(drafts)
        source = (base + step).clamp(max=T - 1)  # the target state that chose the token drafted now
        possible = inside & (base + step + 1 < length[:, None])
        rows = torch.gather(row_of, 1, source)
        use = possible & (rows >= 0)
        weight = torch.where(alive, 1.0, args.dead_weight)[use]
        loss, top = SoftCrossEntropy.apply(
            head.readout(hidden[use]), out_rows, labels, rows[use], weight / weight.sum().clamp(min=1), offset
        )
        total = total + share[step - 1] * loss
        hit = torch.zeros_like(alive)
        hit[use] = candidates[top] == to_draft[torch.gather(following, 1, source)[use]]
        alive = alive & hit
        accepted[step - 1] = (alive & possible).sum()
        if step < args.steps:
            go = possible & (alive | (torch.rand(alive.shape) < args.keep)) & (base + step + 2 < length[:, None])
            keep = go.float().topk(max(1, int(go.sum(1).max())), 1).indices.sort(1).values
            drafts.send(keep)
            base, alive, inside = (torch.gather(t, 1, keep) for t in (base, alive, go))
    return total, accepted, bases


def cmd_train(args: argparse.Namespace) -> None:
    """Fit the head within a time box; workers update shared weights without locks (Hogwild)."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    config = json.loads((args.target / "config.json").read_text())
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    corpus, held = Corpus(args.data, hidden), Corpus([args.held_out], hidden)
    rows = [row for row in corpus.rows if len(row["tokens"]) - row["prompt_len"] > 2 * args.steps]
    if args.resume:
        saved = torch.load(args.resume)
        draft_ids, inv_std = saved["draft_ids"], saved["inv_std"]
    else:
        draft_ids = choose_draft_vocabulary(rows, args.target, vocab, args.draft_vocab)
        sample = random.Random(args.seed).sample(rows, min(300, len(rows)))
        states = torch.cat([corpus.features(row)[row["prompt_len"] :, :3].float() for row in sample])
        inv_std = 1 / states.std(0).clamp(min=1e-3).flatten()
    to_draft = torch.full((vocab,), -1)
    to_draft[draft_ids] = torch.arange(len(draft_ids))
    weights = load_file(args.target / "model.safetensors")
    longest = max(len(row["tokens"]) for row in corpus.rows + held.rows)
    head = DraftHead(config, args.intermediate, draft_ids, longest + args.steps + 8)
    head.warm_start(weights, inv_std)
    if args.resume:
        head.load_state_dict(saved["state"])
    target_rows = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[draft_ids].to(torch.bfloat16)
    del weights
    facts = {
        "conversations": len(rows),
        "answer_tokens": len(answer_tokens(rows)),
        "coverage_train": round(float((to_draft[answer_tokens(rows)] >= 0).float().mean()), 4),
        "coverage_held_out": round(float((to_draft[answer_tokens(held.rows)] >= 0).float().mean()), 4),
        "parameters": sum(p.numel() for p in head.parameters()),
    }
    print(json.dumps(facts), flush=True)
    print("start", walk(head, held, args.eval_steps, args.k), flush=True)

    rank, children = 0, []
    head.share_memory()
    begun = time.time()
    for other in range(1, args.workers):
        child = os.fork()
        if child == 0:
            rank = other
            break
        children.append(child)
    torch.manual_seed(args.seed + rank)
    named = dict(head.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and name != "lm_head"]
    vectors = [p for p in named.values() if p.dim() == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": vectors}, {"params": [head.lm_head], "scale": args.lm_head_lr}],
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        ),
    ]
    average = {name: p.detach().clone() for name, p in named.items()}
    log = {"loss": 0.0, "accepted": torch.zeros(args.steps), "bases": 0}
    updates = seen = epoch = 0
    next_eval = args.eval_minutes
    share = 0.0
    while share < 1:
        for chosen in batches(rows, args.batch, args.seed + epoch)[rank :: args.workers]:
            share = (time.time() - begun) / (60 * args.minutes)
            if share >= 1:
                break
            cosine = args.lr_end + (1 - args.lr_end) * 0.5 * (1 + math.cos(math.pi * share))
            rate = args.lr * min(1.0, (updates + 1) / args.warmup) * cosine
            loss, accepted, bases = unrolled_loss(head, corpus.batch(chosen), target_rows, to_draft, args)
            for optimizer in optimizers:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("scale", 1.0)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            updates, seen = updates + 1, seen + bases
            if rank:
                continue
            decay = min(args.average, (1 + updates) / (10 + updates))
            with torch.no_grad():
                for name, p in named.items():
                    average[name].lerp_(p, 1 - decay)
            log["loss"] += float(loss.detach())
            log["accepted"] += accepted
            log["bases"] += bases
            minutes = (time.time() - begun) / 60
            if updates % args.log_every == 0:
                p = [round(x, 3) for x in (log["accepted"] / log["bases"]).tolist()]
                print(
                    f"{minutes:.1f} min, update {updates} (worker 0), pass {epoch + 1}, {seen} bases, "
                    f"loss {log['loss'] / args.log_every:.3f}, train p {p}, lr {rate:.1e}",
                    flush=True,
                )
                log = {"loss": 0.0, "accepted": torch.zeros(args.steps), "bases": 0}
            if minutes > next_eval:
                next_eval += args.eval_minutes
                print(f"{minutes:.1f} min held-out {save_checkpoint(head, average, held, args)}", flush=True)
        epoch += 1
    if rank:
        (args.out / f"worker-{rank}.json").write_text(json.dumps({"updates": updates, "bases": seen}) + "\n")
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    p, length = save_checkpoint(head, average, held, args)
    others = [json.loads((args.out / f"worker-{r}.json").read_text()) for r in range(1, args.workers)]
    facts |= {
        "minutes": round((time.time() - begun) / 60, 1),
        "updates": updates + sum(o["updates"] for o in others),
        "bases_seen": seen + sum(o["bases"] for o in others),
        "p": p,
        f"acceptance_length_k{args.k}": length,
    }
    write_json(args.out / "train_report.json", facts)
    print(json.dumps(facts), flush=True)


def save_checkpoint(
    head: DraftHead, average: dict[str, Tensor], held: Corpus, args: argparse.Namespace
) -> tuple[list[float], float]:
    """Export the averaged weights and return their held-out walk (see `walk`)."""
    judged = copy.copy(head)
    judged._parameters = {name: torch.nn.Parameter(value) for name, value in average.items()}
    head.export(args.out, average)
    state = {"state": average, "draft_ids": head.draft_ids, "inv_std": head.inv_std}
    torch.save(state, args.out / "checkpoint.pt.new")
    (args.out / "checkpoint.pt.new").replace(args.out / "checkpoint.pt")
    return walk(judged, held, args.eval_steps, args.k)


# -------------------------------------------------------------------------------------------------- evaluate
class StoredHead:
    """A stored head run token by token in fp32, as an engine runs it (batch 1, growing KV cache)."""

    def __init__(self, folder: Path, embed: Tensor) -> None:
        c = json.loads((folder / "config.json").read_text())
        raw = load_file(folder / "model.safetensors")
        self.w = {
            name.removeprefix("midlayer.").removesuffix(".weight"): value.float()
            for name, value in raw.items()
            if name.endswith(".weight")
        }
        self.to_target = torch.arange(len(raw["d2t"])) + raw["d2t"]
        self.draftable, self.embed, self.eps = raw["t2d"], embed, c["rms_norm_eps"]
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        self.cos, self.sin = rope_tables(1024, self.dim, c["rope_theta"])
        self.reset()

    def reset(self) -> None:
        """Forget the cache."""
        self.k = self.v = torch.zeros(self.kv_heads, 0, self.dim)

    def forward(self, ids: Tensor, hidden: Tensor, first: int) -> Tensor:
        """Process S tokens ids (S,) with hidden states (S, H) at positions first..: (S, H) pre-norm."""
        w, S = self.w, len(ids)
        x = torch.cat(
            [
                rms_norm(self.embed[ids], w["input_layernorm"], self.eps),
                rms_norm(hidden, w["hidden_norm"], self.eps),
            ],
            -1,
        )
        cos, sin = self.cos[first : first + S], self.sin[first : first + S]
        q, k, v = (F.linear(x, w[f"self_attn.{n}_proj"]).view(S, -1, self.dim).transpose(0, 1) for n in "qkv")
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.k, self.v = torch.cat([self.k[:, :first], k], 1), torch.cat([self.v[:, :first], v], 1)
        group = self.heads // self.kv_heads
        mask = torch.arange(first + S) <= torch.arange(first, first + S)[:, None]
        a = F.scaled_dot_product_attention(
            q[None],
            self.k.repeat_interleave(group, 0)[None],
            self.v.repeat_interleave(group, 0)[None],
            attn_mask=mask,
        )[0]
        y = hidden + F.linear(a.transpose(0, 1).reshape(S, -1), w["self_attn.o_proj"])
        z = rms_norm(y, w["post_attention_layernorm"], self.eps)
        gate, up = F.linear(z, w["mlp.gate_proj"]), F.linear(z, w["mlp.up_proj"])
        return y + F.linear(F.silu(gate) * up, w["mlp.down_proj"])

    def draft(self, tokens: Tensor, aux: Tensor, done: int, at: int, k: int) -> list[int]:
        """Greedy drafts after target position `at`; tokens[done+1 .. at+1] and aux[done .. at] are new."""
        fused = F.linear(aux[done : at + 1], self.w["fc"])
        hidden, out = self.forward(tokens[done + 1 : at + 2], fused, done)[-1:], []
        for step in range(k):
            logits = F.linear(rms_norm(hidden, self.w["norm"], self.eps), self.w["lm_head"])
            out.append(int(self.to_target[logits.argmax()]))
            if step + 1 < k:
                hidden = self.forward(torch.tensor(out[-1:]), hidden, at + 1 + step)
        return out


@torch.inference_mode()
def cmd_evaluate(args: argparse.Namespace) -> None:
    """Replay greedy answers round by round with a stored head: draft k tokens, keep the matching prefix.

    The drafts after a position do not depend on how the rounds fell before it, so the longest drafts are made
    once for every position, token by token, and the rounds of every k are walked over them.
    """
    torch.set_num_threads(args.threads)
    weights = load_file(args.target / "model.safetensors")
    embed = weights["model.embed_tokens.weight"].float()
    head, corpus = StoredHead(args.head, embed), Corpus([args.data], embed.shape[1])
    answers = answer_tokens(corpus.rows)
    matches = []  # of every conversation: how many of the drafts after each answer position match
    for row in corpus.rows:
        tokens, aux = torch.tensor(row["tokens"]), corpus.features(row)[:, :3].float().flatten(1)
        first, done, found = row["prompt_len"] - 1, 0, []
        head.reset()
        for at in range(first, len(tokens) - 1 - args.margin):
            drafts = head.draft(tokens, aux, done, at, max(args.k))
            wanted = row["tokens"][at + 2 : at + 2 + len(drafts)]
            same = [draft == token for draft, token in zip(drafts, wanted, strict=False)]
            found.append(same.index(False) if False in same else len(same))
            done = at + 1
        matches.append(found)
    report: dict[str, Any] = {
        "conversations": len(corpus.rows),
        "answer_tokens": len(answers),
        "draft_vocabulary_coverage": round(float(head.draftable[answers].float().mean()), 4),
        "model_bytes": (args.head / "model.safetensors").stat().st_size,
    }
    for k in args.k:
        rounds: dict[str, list[int]] = {}
        for row, found in zip(corpus.rows, matches, strict=True):
            at = 0
            while at < len(found):
                for name in ("all", row["kind"]):
                    rounds.setdefault(name, []).append(min(found[at], k))
                at += 1 + min(found[at], k)
        report[f"k={k}"] = {
            name: {
                "rounds": len(kept),
                "p": [round(sum(x >= j for x in kept) / len(kept), 4) for j in range(1, k + 1)],
                "acceptance_length": round(1 + sum(kept) / len(kept), 4),
            }
            for name, kept in sorted(rounds.items())
            if name
        }
        print(f"k={k}", json.dumps(report[f"k={k}"]), flush=True)
    if args.report:
        write_json(args.report, report)


# ---------------------------------------------------------------------------------------------- command line
def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        sub.set_defaults(run=run)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--threads", type=int, default=1, help="threads of each process")
        if name != "prompts":
            sub.add_argument("--target", type=Path, required=True, help="target model folder")
        return sub

    p = command("target", cmd_target)
    p.add_argument("--gguf", type=Path, required=True)
    p = command("prompts", cmd_prompts)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--held-out", type=Path, required=True, help="prompts that must not occur (JSON lines)")
    p.add_argument("--count", type=int, default=12000)
    p = command("generate", cmd_generate)
    p.add_argument("--prompts", type=Path, required=True, help="JSON lines: prompt, kind, follow_up")
    p.add_argument("--out", type=Path, required=True, help="folder for features.bin and index.jsonl")
    p.add_argument("--minutes", type=float, default=0, help="stop after this time (0: when all are answered)")
    p.add_argument("--skip", type=int, default=0, help="prompts answered by an earlier run")
    p.add_argument("--shard", type=int, nargs=2, default=[0, 1], metavar=("INDEX", "OF"))
    p.add_argument("--slots", type=int, default=128, help="conversations decoded together")
    p.add_argument("--refill", type=int, default=8, help="free slots of a group that start a prefill")
    p.add_argument("--max-len", type=int, default=352, help="tokens of a conversation")
    p.add_argument("--max-new", type=int, nargs="+", default=[96, 128, 160, 192], help="answer limits, one drawn")
    p.add_argument("--temperature", type=float, default=0.6, help="of the answers that are not greedy; 0: all are")
    p.add_argument("--greedy-share", type=float, default=0.7)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the matrix products")
    p.add_argument("--no-compile", action="store_true", help="do not fuse the decode step with torch.compile")
    p = command("train", cmd_train)
    p.add_argument("--data", type=Path, nargs="+", required=True)
    p.add_argument("--held-out", type=Path, required=True, help="folder of held-out answers, only measured")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--resume", type=Path, help="checkpoint.pt to go on from")
    p.add_argument("--minutes", type=float, default=45)
    p.add_argument("--workers", type=int, default=2, help="processes")
    p.add_argument("--draft-vocab", type=int, default=8192)
    p.add_argument("--intermediate", type=int, default=1536)
    p.add_argument("--steps", type=int, default=4, help="unrolled draft steps")
    p.add_argument("--step-weights", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.4, 0.3])
    p.add_argument("--keep", type=float, default=0.25, help="share of missed drafts that are continued")
    p.add_argument("--dead-weight", type=float, default=0.5, help="loss weight of continued missed drafts")
    p.add_argument("--label-temperature", type=float, default=0.8)
    p.add_argument(
        "--candidate-floor",
        type=float,
        default=0.03,
        help="tokens this likely anywhere in a batch are always in its softmax",
    )
    p.add_argument("--negatives", type=int, default=768, help="others drawn into the softmax of a batch")
    p.add_argument("--batch", type=int, default=24, help="conversations an update")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--lr-end", type=float, default=0.02, help="final share of the learning rate")
    p.add_argument("--lm-head-lr", type=float, default=0.5, help="learning rate factor of the output rows")
    p.add_argument("--warmup", type=int, default=60, help="updates")
    p.add_argument("--average", type=float, default=0.995, help="decay of the weight average")
    p.add_argument("--eval-minutes", type=float, default=4)
    p.add_argument("--eval-steps", type=int, default=5)
    p.add_argument("--k", type=int, default=3, help="drafts a round in the held-out walk")
    p.add_argument("--log-every", type=int, default=50, help="updates")
    p = command("evaluate", cmd_evaluate)
    p.add_argument("--data", type=Path, required=True, help="folder of greedy fp32 answers")
    p.add_argument("--head", type=Path, required=True)
    p.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    p.add_argument("--margin", type=int, default=5, help="do not start rounds this close to the end of an answer")
    p.add_argument("--report", type=Path, help="write the result here too")
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.run(arguments)
